"""Where weights go: decided before they are read, the same tokens wherever they lie."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_cuda import FakeCuda, Gpu
from families import build, oracle, prompts
from transformers import AutoModelForCausalLM, LlamaConfig

import jackfield
from jackfield.bridge import weights
from jackfield.bridge.footprint import loaded_bytes
from jackfield.bridge.placement import Placement, spell
from jackfield.contracts import Requirements
from jackfield.errors import CheckpointError, PlanError, UsageError
from jackfield.planning.device_map import asked
from jackfield.planning.selecting import decide
from jackfield.registry.discovery import registry

if TYPE_CHECKING:
    from forking import Forks

pytest.importorskip("accelerate", reason="needs jackfield[accelerate]")

PROMPTS = prompts((3, 9))
LAYER_1 = {"": "cpu", "model.layers.1": "disk"}
WHOLE = 92_800  # bytes of the tiny Llama in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build("llama", torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = build("llama", torch.float32)
    return [oracle(model, prompt, 6) for prompt in PROMPTS]


def tokens(engine: jackfield.Engine) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=6)]


@pytest.mark.parametrize(
    "places",
    [
        {"device_map": LAYER_1},
        {"device_map": {"": "cpu", "model.embed_tokens": "disk"}},
        {"device_map": {"": "cpu", "lm_head.weight": "disk"}},
        {"device_map": {"": "disk", "model.layers": "cpu"}},
        {"device_map": "disk"},
        {"max_memory": {"cpu": "80kB"}},
        {"max_memory": {"cpu": "80kB"}, "device_map": "balanced"},
        {"max_memory": {"cpu": "80kB"}, "device_map": "balanced_low_0"},
        {"max_memory": {"cpu": "80kB"}, "device_map": "sequential"},
    ],
)
@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
@pytest.mark.one_in(4)
def test_weights_on_disk_give_the_same_tokens(
    folder: Path, expected: list[list[int]], places: dict[str, Any], cache: str
) -> None:
    with jackfield.load(folder, cache_implementation=cache, **places) as engine:
        placement = engine.plan.placement
        assert placement is not None
        assert placement.spread
        assert placement.offloaded == ("disk",)
        assert sum(placement.sizes.values()) == WHOLE
        assert loaded_bytes(engine.model) == placement.sizes.get("cpu", 0)
        assert tokens(engine) == expected


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.one_in(4)
def test_other_families(family: str, attention: str, tmp_path: Path) -> None:
    """Mixture-of-experts weights are stored in another form, so transformers writes them anew."""
    model = build(family)
    model.save_pretrained(tmp_path / "model")
    folder = tmp_path / "there"
    places = {"device_map": "disk", "offload_folder": folder}
    with jackfield.load(tmp_path / "model", attn_implementation=attention, **places) as engine:
        (own,) = folder.iterdir()
        moe = "moe" in family or family == "mixtral"
        assert bool(list(own.iterdir())) == moe
        assert tokens(engine) == [oracle(model, prompt, 6) for prompt in PROMPTS]
        assert engine.report()["attention"].calls > 0
    assert list(folder.iterdir()) == []


def test_all_fit_on_one_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then accelerate is not asked, and nothing is spread."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for arguments in ({}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}},
                      {"max_memory": {"cpu": WHOLE}}):  # fmt: skip
        plan = jackfield.plan(folder, **arguments)  # type: ignore[arg-type]
        assert plan.placement == Placement("cpu", {"": "cpu"}, {"cpu": WHOLE})
        assert "all weights on cpu, 92.8 kB" in str(plan)
    with pytest.raises(
        UsageError, match=r"needs accelerate: pip install 'jackfield\[accelerate\]'"
    ):
        jackfield.plan(folder, max_memory={"cpu": WHOLE - 1})


WITHOUT = """
import sys
sys.modules["accelerate"] = sys.modules["peft"] = None
import jackfield
with jackfield.load("demo", device_map="cpu") as engine:
    print(len(engine.generate("Once", max_new_tokens=3)[0].token_ids))
for arguments in ({"device_map": {"": "cpu", "model.layers": "disk"}}, {"adapter": sys.argv[1]}):
    try:
        jackfield.load("demo", **arguments)
    except jackfield.JackfieldError as error:
        print(error)
"""


def test_neither_library_is_needed_without_its_work(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, accelerate, peft = done.stdout.splitlines()
    assert first == "3"
    assert "pip install 'jackfield[accelerate]'" in accelerate
    assert "pip install 'jackfield[peft]'" in peft


def test_what_is_planned_is_what_is_loaded(folder: Path) -> None:
    plan = jackfield.plan(folder, device_map=LAYER_1)
    with jackfield.load(folder, device_map=LAYER_1) as engine:
        assert engine.plan.placement == plan.placement
        on_disk = {n for n, p in engine.model.named_parameters() if p.device.type == "meta"}
    assert on_disk
    assert all(name.startswith("model.layers.1.") for name in on_disk)
    told = plan.to_dict()["placement"]
    assert told["bytes"] == {"cpu": 61_824, "disk": 30_976}
    assert told["modules"]["model.layers.1"] == "disk"
    assert (told["device"], told["execution_devices"]) == ("cpu", ["cpu"])
    assert "31.0 kB on disk (model.layers.1)" in str(plan)


def test_a_layer_is_not_taken_for_one_whose_number_begins_alike(tmp_path: Path) -> None:
    """transformers matches the names of a map as prefixes: "layers.1" is one of "layers.10"."""
    config = LlamaConfig(num_hidden_layers=12, vocab_size=8, hidden_size=8, intermediate_size=8,
                         num_attention_heads=1)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with jackfield.load(tmp_path, device_map={"": "cpu", "model.layers.1": "disk"}) as engine:
        away = {n for n, p in engine.model.named_parameters() if p.device.type == "meta"}
        assert {name.split(".")[2] for name in away} == {"1"}


def test_tied_weights_stay_together() -> None:
    """The demo model's output head is its embedding."""
    with jackfield.load("demo") as engine:
        expected = engine.generate("Once upon a time", max_new_tokens=8)[0].text
    with jackfield.load("demo", device_map={"": "cpu", "model.embed_tokens": "disk"}) as engine:
        placement = engine.plan.placement
        assert placement is not None
        assert placement.modules["lm_head"] == "disk"
        assert engine.generate("Once upon a time", max_new_tokens=8)[0].text == expected
    apart = {"": "cpu", "model.embed_tokens": "disk", "lm_head": "cpu"}
    with pytest.raises(UsageError, match=r"lm_head.weight and model.embed_tokens.weight are one"):
        jackfield.plan("demo", device_map=apart)


def test_temporary_folders_are_removed(folder: Path, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = jackfield.load(folder, device_map="disk")
    assert [path.name.startswith("jackfield-") for path in tmp_path.iterdir()] == [True]
    engine.close()
    assert list(tmp_path.iterdir()) == []
    engine = jackfield.load(folder, device_map="disk")
    del engine  # dropped without being closed
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("jackfield.engine.assembly.Loop", None)
    with pytest.raises(TypeError):
        jackfield.load(folder, device_map="disk")
    assert list(tmp_path.iterdir()) == []
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    monkeypatch.undo()
    jackfield.load(folder, device_map="disk", offload_folder=mine).close()
    assert [path.name for path in mine.iterdir()] == ["file"]


def test_a_draft_model_does_not_go_to_disk_with_the_model() -> None:
    chosen: dict[str, Any] = {"decoding": "assisted", "assistant_model": "demo-draft"}
    plan = jackfield.plan("demo", device_map="disk", **chosen)
    assert plan.placement.offloaded == ("disk",)
    assert not plan.assistant.placement.spread
    on_cpu = jackfield.plan("demo", device_map="cpu", **chosen)  # where one device is named
    assert on_cpu.assistant.placement.modules == {"": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_memory": {}}, "max_memory must be a dict"),
        ({"max_memory": 4}, "max_memory must be a dict"),
        (
            {"max_memory": {"cpu": "3 parsecs"}},
            "max_memory of cpu must be a size such as",
        ),
        ({"max_memory": {"cpu": "4 Gb"}}, "did you mean 'GB'"),
        ({"max_memory": {"cpu": 0}}, "must be a size such as 24GB or 512MiB, not 0"),
        ({"max_memory": {"cpu": True}}, "must be a size such as 24GB or 512MiB, not True"),
        ({"max_memory": {"cpu": -1}}, "must be a size such as 24GB or 512MiB, not -1"),
        ({"max_memory": {"cpu": "0"}}, "must be a size such as 24GB or 512MiB, not 0"),
        ({"max_memory": {"cpu": "0.1B"}}, "must be a size such as 24GB or 512MiB, not '0.1B'"),
        ({"max_memory": {"cpu": 1e9}}, "must be a size such as 24GB or 512MiB, not 1000000000.0"),
        ({"max_memory": {0: 1, "cuda:0": 1}}, "names cuda:0 twice"),
        ({"max_memory": {1.5: 1}}, "1.5 is not a device"),
        ({"max_memory": {"cpu": "1MB", "gpu": "1MB"}}, "'gpu' is not a device"),
        ({"max_memory": {"disk": "1MB"}, "device_map": "cpu"}, "says nothing of device_map='cpu'"),
        ({"max_memory": {"cpu": "1MB"}, "device_map": LAYER_1}, "drop max_memory"),
        ({"device_map": {}}, "empty dict"),
        ({"device_map": 1.5}, "device_map must be"),
        ({"device_map": True}, "device_map must be"),
        ({"device_map": []}, "device_map must be"),
        ({"device_map": {"": "auto"}}, "not '' to 'auto'"),
        ({"device_map": {0: "cpu"}}, "not 0 to 'cpu'"),
        ({"device_map": {"": "gpu"}}, "device_map='gpu' is not a device"),
        ({"device_map": {"": "cuda:99"}}, "device_map='cuda:99' is not a device"),
        ({"device_map": {"model.layer.1": "disk"}}, "did you mean 'model.layers.1'"),
        ({"device_map": {"model.layers.1": "disk"}}, "add '' for the rest"),
        ({"device_map": "cpu", "offload_folder": "x"}, "puts none there"),
        ({"device_map": {"": "cpu"}, "offload_folder": "x"}, "puts none there"),
        ({"device_map": LAYER_1, "offload_folder": 7}, "must be a folder's path"),
        ({"device_map": LAYER_1, "offload_folder": __file__}, "is not a folder"),
    ],
)
def test_mistakes(folder: Path, arguments: dict[str, Any], says: str) -> None:
    for act in (jackfield.plan, jackfield.load):
        with pytest.raises(UsageError) as caught:
            act(folder, **arguments)
        message = str(caught.value)
        assert says in message
        assert "\n" not in message


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    with pytest.raises(UsageError, match="no weights can be written to offload_folder="):
        jackfield.load(folder, device_map="disk", offload_folder="/proc/nowhere")


def test_sizes() -> None:
    given = {"0": "1kB", "cpu": 5, "cuda:1": " 12 ", 2: "1.5 GiB"}
    found = {"cuda:0": 1000, "cpu": 5, "cuda:1": 12, "cuda:2": 3 << 29}
    assert asked("auto", given).max_memory == found
    assert spell({"a": "x", "a.b": "y"}, ["a.b.c", "a.bc", "d"]) == {"a.b.c": "y", "a.bc": "x"}


def test_too_little_memory_says_how_much_would_do(folder: Path) -> None:
    """The embedding is the largest thing that a step brings in: 120 × 32 numbers."""
    with pytest.raises(UsageError) as caught:
        jackfield.load(folder, max_memory={"cpu": "15kB"})
    assert "15.4 kB for model.embed_tokens, which is brought in; cpu=15360 would do" in str(
        caught.value
    )
    with jackfield.load(folder, max_memory={"cpu": 15_360}) as engine:
        assert engine.generate([1, 2], max_new_tokens=1)


def test_nothing_is_made_smaller_unasked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bridge.spreading", "planning.placing"):
        monkeypatch.setattr(f"jackfield.{module}.free_bytes", lambda _: 60_000)
    with pytest.raises(PlanError) as caught:
        jackfield.load(folder, device_map="cpu")
    message = str(caught.value)
    assert "take 92.8 kB in float32 and do not fit on cpu: free there are 60.0 kB" in message
    assert "dtype='bfloat16' (46.4 kB)" in message
    assert "device_map='auto'" in message
    assert "\n" not in message
    with jackfield.load(folder, device_map="cpu", dtype="bfloat16") as engine:
        assert engine.model.dtype == torch.bfloat16
    plan = jackfield.plan(folder)  # auto goes to disk, in the dtype of the checkpoint
    assert plan.requirements.dtype == "float32"
    assert plan.placement is not None
    assert plan.placement.offloaded == ("disk",)
    assert plan.placement.sizes["cpu"] <= 54_000  # a tenth is left for the step


def test_the_cache_has_what_the_resident_weights_leave(folder: Path) -> None:
    def available(**arguments: Any) -> int:
        memory = jackfield.plan(folder, cache_implementation="dynamic", **arguments).memory()
        assert memory is not None
        return memory.available

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jackfield.planning.planning.free_bytes", lambda _: 1_000_000)
        assert available() == 1_000_000 - WHOLE
        assert available(device_map=LAYER_1) == 1_000_000 - 61_824


def test_a_quantizer_that_keeps_all_in_one_place(folder: Path) -> None:
    """`transformers`, which reads whatever transformers knows, declares nothing of it."""
    backend = registry().of_kind("quantizer")
    known = next(r.backend for r in backend if r.name == "transformers")
    needs = jackfield.plan(folder).requirements
    spread = replace(needs, execution_devices=("cpu",), offloaded=("disk",), adapter="LORA",
                     merge_adapter=True, stored={"quant_method": "gptq"})  # fmt: skip
    reasons = known.refuse(spread, known.options())
    assert "keeps all weights on one device (offload), and they go to cpu, disk" in reasons
    assert "takes no LORA adapter on top (adapters)" in reasons
    assert any("cannot merge an adapter" in reason for reason in reasons)


def two_gpus(needs: Requirements) -> Requirements:
    return replace(needs, device="cuda", execution_devices=("cuda:0", "cuda:1"))


def test_pages_do_not_go_over_several_devices(folder: Path) -> None:
    needs = two_gpus(jackfield.plan(folder).requirements)
    with pytest.raises(
        PlanError, match="its page tables on one device, and layers compute on cuda:0, cuda:1"
    ):
        decide(registry(), needs, {"cache": "paged?num_tokens=64"})
    with pytest.raises(PlanError, match="to one device, and they compute on cuda:0, cuda:1"):
        decide(registry(), needs, {"cache": "offloaded"})
    with pytest.raises(PlanError, match="cpu_decode"):
        decide(registry(), needs, {"attention": "cpu_decode"})
    assert decide(registry(), needs, {})["cache"].registered.name == "dynamic"


def test_maps_over_gpus_that_are_not_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision alone, which needs no device: two GPUs, then the CPU, then disk."""
    for module in ("planning.placing", "bridge.devices"):
        monkeypatch.setattr(f"jackfield.{module}.check_device", torch.device)
    plan = jackfield.plan(folder, max_memory={0: "70kB", 1: "40kB", "cpu": "1MB"},
                          device_map="sequential")  # fmt: skip
    placement = plan.placement
    assert placement is not None
    assert placement.device == "cuda:0"
    assert placement.execution_devices == ("cuda:0", "cuda:1")
    assert placement.modules["model.embed_tokens"] == "cuda:0"
    assert placement.sizes["cuda:0"] <= 70_000
    assert sum(placement.sizes.values()) == WHOLE
    assert plan["cache"].registered.name == "dynamic"
    plan = jackfield.plan(folder, device_map={"": 0, "model.layers.1": "cpu"})
    placement = plan.placement
    assert placement is not None
    assert placement.execution_devices == ("cuda:0",)
    assert placement.offloaded == ("cpu",)
    assert plan.requirements.device == "cuda"


def test_a_live_model_that_accelerate_has_spread(
    folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    places = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path)
    assert model.device.type == "meta"
    with jackfield.load(model) as engine:
        placement = engine.plan.placement
        assert placement is not None
        assert placement.at("disk") == ["model.embed_tokens", "lm_head"]
        assert placement.sizes == {"disk": 30_720, "cpu": WHOLE - 30_720}
        assert engine.plan.requirements.live
        assert tokens(engine) == expected
    for mistake in ({"device_map": "disk"}, {"device_map": "balanced"}, {"device_map": LAYER_1},
                    {"max_memory": {"cpu": "1GB"}}, {"offload_folder": tmp_path}):  # fmt: skip
        with pytest.raises(UsageError, match="a live model is used where it is"):
            jackfield.load(model, **mistake)


def test_a_folder_with_an_adapter_beside_the_model(tmp_path: Path) -> None:
    """transformers would load both, and nobody would have said so."""
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="an adapter beside a model"):
        jackfield.load(tmp_path)


def test_the_command_line(cli: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = str(folder)
    done = cli("explain", model, "--device", "=cpu,model.layers.1=disk")
    assert done.code == 0
    assert "weights: 61.8 kB on cpu" in done.out
    done = cli("explain", model, "--max-memory", "cpu=80kB", "--offload-folder", "x", "--json")
    assert done.json["plan"]["placement"]["bytes"]["disk"] > 0
    cli("explain", model, "--max-memory", "80kB").assert_failed(
        2, "cannot read --max-memory '80kB'"
    )
    cli("explain", model, "--max-memory", "cpu=1kB").assert_failed(2, "max_memory gives cpu 1.0 kB")
    cli("explain", model, "--device", "=cpu,=disk").assert_failed(2, "--device names '' twice")
    cli("explain", model, "--device", "balancd").assert_failed(2, "device_map='balancd'")
    done = cli("generate", "Once", "--device", "=cpu,model.layers=disk", "--max-new-tokens", "2")
    assert done.code == 0, done.err
    assert "Some parameters" not in done.err


PEAK = """
import ctypes, sys, threading, time, torch, jackfield
torch.set_num_threads(1)
M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)  # what is freed is given back
def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.001)
for place in ("disk", "cpu"):  # the one that takes little first: what it leaves is not the other's
    with jackfield.load("demo", attn_implementation="sdpa", device_map=place) as engine:
        engine.generate([1, 2, 3], max_new_tokens=3)  # libraries take some, too
    before = anonymous()
    most, done = 0, False
    thread = threading.Thread(target=watch)
    thread.start()
    with jackfield.load(sys.argv[1], dtype="float32", device_map=place,
                        attn_implementation="sdpa", cache_implementation="dynamic") as engine:
        ids = engine.generate([1, 2, 3], max_new_tokens=3)[0].token_ids
    done = True
    thread.join()
    print((most - before) * 1024, *ids)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_peak_memory(tmp_path: Path, forks: Forks) -> None:
    """134 MB of weights; on disk, a step holds one module of them at a time.

    They are widened when they are read: what is mapped from a file is not counted.
    """
    config = LlamaConfig(vocab_size=64, hidden_size=512, intermediate_size=2048,
                         num_hidden_layers=8, num_attention_heads=8, eos_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    done = forks.python("-c", PEAK, tmp_path)
    assert done.returncode == 0, done.stderr
    disk, cpu = ([int(part) for part in line.split()] for line in done.stdout.splitlines())
    assert cpu[1:] == disk[1:]
    assert cpu[0] > 130e6
    assert disk[0] < 0.15 * cpu[0], (disk, cpu)


def test_weights_are_read_to_the_gpu_and_not_to_main_memory_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes each weight where its device map has it; without one, on the processor."""
    FakeCuda([Gpu(), Gpu()]).install(monkeypatch)
    for accelerate in (True, False):
        for device in ("cuda:1", "cpu"):
            monkeypatch.setattr(weights, "has_accelerate", lambda found=accelerate: found)
            read = Reading(torch.device(device if accelerate else "cpu"))
            monkeypatch.setattr(weights, "text_class", lambda _, read=read: read)
            prepared = jackfield.api.prepare(folder, device_map=device, attn_implementation="eager")
            with contextlib.suppress(Reading.Done):
                prepared.load()
            assert read.device_map == ({"": 1} if accelerate and device != "cpu" else None)
            assert read.moved == ([] if accelerate or device == "cpu" else [torch.device(device)])


class Reading:
    """In the place of `AutoModelForCausalLM`: notes where weights are read to and moved."""

    class Done(Exception):  # noqa: N818 - nothing is wrong
        pass

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved: list[torch.device] = []

    def from_pretrained(self, *_: Any, device_map: Any, **__: Any) -> Any:
        self.device_map = device_map
        return self, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}

    def to(self, device: torch.device) -> None:
        self.moved.append(device)

    def eval(self) -> None:
        raise self.Done
