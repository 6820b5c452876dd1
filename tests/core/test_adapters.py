"""Adapters of PEFT: checked before weights are read, named, merged, switched."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Gate
from families import build, oracle, prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, QuantoConfig

import jackfield
from jackfield.bridge.adapters import hushed
from jackfield.bridge.footprint import loaded_bytes
from jackfield.errors import CheckpointError, PlanError, UsageError

peft = pytest.importorskip("peft", reason="needs jackfield[peft]")

LONG = prompts((3, 70))
CONFIGS: dict[str, Any] = {
    "lora": lambda **more: peft.LoraConfig(r=4, init_lora_weights=False, **more),
    "dora": lambda **more: peft.LoraConfig(r=4, use_dora=True, init_lora_weights=False, **more),
    "rslora": lambda **more: peft.LoraConfig(
        r=2, use_rslora=True, rank_pattern={"k_proj": 6}, init_lora_weights=False, **more
    ),
    "loha": lambda **more: peft.LoHaConfig(r=4, init_weights=False, **more),
    "lokr": lambda **more: peft.LoKrConfig(r=4, init_weights=False, **more),
}
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gemma3": ["q_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj"],
    "gpt-oss": ["q_proj", "v_proj"],
}


def adapted(family: str, kind: str = "lora", dtype: torch.dtype = torch.float64,
            **more: Any) -> Any:  # fmt: skip
    """A PeftModel with an adapter of random weights, always the same ones."""
    more.setdefault("target_modules", TARGETS[family])
    if family == "gpt2":
        more.setdefault("fan_in_fan_out", True)
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(2)
        config = CONFIGS[kind](task_type="CAUSAL_LM", **more)
        return peft.get_peft_model(build(family, dtype), config).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    adapted("llama").save_pretrained(path)
    return path


@pytest.fixture
def mine(lora: Path, tmp_path: Path) -> Path:
    """A copy of the adapter, to be broken."""
    return shutil.copytree(lora, tmp_path / "adapter")


@pytest.fixture(scope="module")
def with_it() -> list[list[int]]:
    found = adapted("llama")
    return [oracle(found, prompt, 6) for prompt in LONG]


@pytest.fixture(scope="module")
def without() -> list[list[int]]:
    found = build("llama")
    return [oracle(found, prompt, 6) for prompt in LONG]


def tokens(engine: jackfield.Engine) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(LONG, max_new_tokens=6)]


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "cpu_decode"])
@pytest.mark.one_in(4)
def test_every_cell_equals_transformers(
    model: Path, lora: Path, with_it: list[list[int]], without: list[list[int]],
    attention: str, cache: str,
) -> None:  # fmt: skip
    assert with_it != without
    selections = {"attn_implementation": attention, "cache_implementation": cache}
    with jackfield.load(model, adapter=lora, **selections) as engine:
        assert tokens(engine) == with_it
        layers = engine.report()["attention"]
        assert set(layers.prefill) == set(layers.decode) == {0, 1}


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3", "gpt-oss"])
@pytest.mark.one_in(4)
def test_families(family: str, tmp_path: Path) -> None:
    reference = adapted(family)
    reference.save_pretrained(tmp_path / "adapter")
    build(family).save_pretrained(tmp_path / "model")
    with jackfield.load(tmp_path / "model", adapter=tmp_path / "adapter") as engine:
        assert tokens(engine) == [oracle(reference, prompt, 6) for prompt in LONG]
    with jackfield.load(build(family)) as engine:
        assert tokens(engine) != [oracle(reference, prompt, 6) for prompt in LONG]


@pytest.mark.parametrize("kind", [*CONFIGS, "ia3"])
@pytest.mark.parametrize("merge", [False, True])
def test_kinds(model: Path, tmp_path: Path, kind: str, merge: bool) -> None:
    if kind == "ia3":
        with torch.random.fork_rng():
            torch.manual_seed(3)
            config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"],
                                    feedforward_modules=["down_proj"],
                                    init_ia3_weights=False)  # fmt: skip
            reference = peft.get_peft_model(build("llama"), config).eval()
    else:
        reference = adapted("llama", kind)
    reference.save_pretrained(tmp_path)
    with jackfield.load(model, adapter=tmp_path, merge_adapter=merge) as engine:
        assert tokens(engine) == [oracle(reference, prompt, 6) for prompt in LONG]
        adapter = engine.plan.adapter
        assert adapter is not None
        assert adapter.rank == {"ia3": None, "rslora": 6}.get(kind, 4)
        assert adapter.merged is merge


def test_saved_modules(model: Path, tmp_path: Path, without: list[list[int]]) -> None:
    """Modules that an adapter replaces as a whole are switched with it."""
    reference = adapted("llama", target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        reference.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
    reference.save_pretrained(tmp_path)
    expected = [oracle(reference, prompt, 6) for prompt in LONG]
    with jackfield.load(model, adapter=tmp_path) as engine:
        assert tokens(engine) == expected
        engine.disable_adapter()
        assert tokens(engine) == without
        engine.enable_adapter()
        assert tokens(engine) == expected


def test_it_is_on_record(model: Path, lora: Path) -> None:
    plan = jackfield.plan(model, adapter=lora)
    told = {"location": str(lora), "peft_type": "LORA", "rank": 4, "targets": 10, "merged": False,
            "biases": False}  # fmt: skip
    assert plan.to_dict()["adapter"] == told
    assert f"adapter: {lora} (LORA of rank 4 on 10 modules)" in str(plan)
    with jackfield.load(model, adapter=lora) as engine:
        assert engine.plan.adapter == plan.adapter
        assert loaded_bytes(engine.model) == engine.plan.requirements.weight_bytes
        completion = engine.generate([1, 2], max_new_tokens=1)[0]
        assert completion.report.to_dict()["adapter"] == {**told, "state": "on"}
        engine.disable_adapter()
        completion = engine.generate([1, 2], max_new_tokens=1)[0]
        assert completion.report.to_dict()["adapter"]["state"] == "off"
        assert str(completion.report).endswith("switched off")
    with jackfield.load(model) as engine:
        assert "adapter" not in engine.generate([1], max_new_tokens=1)[0].report.to_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_is_the_same_up_to_rounding(model: Path, lora: Path, dtype: torch.dtype) -> None:
    """The bound is what this precision does to the unmerged model itself."""
    ids = torch.tensor([LONG[0]])

    def logits(dtype: torch.dtype, **arguments: Any) -> torch.Tensor:
        name = str(dtype).removeprefix("torch.")
        with jackfield.load(model, adapter=lora, dtype=name, **arguments) as engine:
            lora_left = [n for n, _ in engine.model.named_modules() if "lora" in n]
            assert bool(lora_left) is not bool(arguments)
        with torch.no_grad():
            return engine.model(ids).logits.double()

    exact = logits(torch.float64)
    bound = 4 * (logits(dtype) - exact).abs().max()
    assert 0 < bound < 1 if dtype == torch.float32 else bound > 0
    assert (logits(dtype, merge_adapter=True) - exact).abs().max() <= bound


def test_switching(
    model: Path, lora: Path, with_it: list[list[int]], without: list[list[int]]
) -> None:
    """The prompt has two full pages that its next reader would find."""
    with jackfield.load(model, adapter=lora, cache_implementation="paged") as engine:
        for _ in range(2):
            assert tokens(engine) == with_it
            usage = engine.statistics().cache
            assert usage is not None
            assert usage.pages_kept > 0
            engine.disable_adapter()
            usage = engine.statistics().cache
            assert usage is not None
            assert usage.pages_kept == 0
            assert tokens(engine) == without
            engine.enable_adapter()
        gate = Gate(engine)
        request = engine.submit(LONG[0], max_new_tokens=6)
        with pytest.raises(UsageError, match="1 requests are open"):
            engine.disable_adapter()
        gate.lift()
        assert request.result().token_ids == with_it[0]
        engine.disable_adapter()
    with pytest.raises(UsageError, match="engine is closed"):
        engine.enable_adapter()


def test_an_adapter_is_off_within_a_block_and_on_after_it(
    model: Path, lora: Path, without: list[list[int]], with_it: list[list[int]]
) -> None:
    with jackfield.load(model, adapter=lora) as engine:
        with engine.disable_adapter():
            assert tokens(engine) == without
            with engine.disable_adapter():  # off before, so it stays off
                assert tokens(engine) == without
            assert tokens(engine) == without
        assert tokens(engine) == with_it
        with pytest.raises(ZeroDivisionError), engine.disable_adapter():
            raise ZeroDivisionError
        assert tokens(engine) == with_it
        engine.disable_adapter()
        assert tokens(engine) == without


def test_what_cannot_be_switched(model: Path, lora: Path) -> None:
    with (
        jackfield.load(model, adapter=lora, merge_adapter=True) as engine,
        pytest.raises(UsageError, match="is merged into the weights"),
    ):
        engine.disable_adapter()
    with jackfield.load(model) as engine, pytest.raises(UsageError, match="has no adapter"):
        engine.disable_adapter()


def test_deterministic(model: Path, lora: Path) -> None:
    with jackfield.load(model, adapter=lora, dtype="float32", deterministic=True) as engine:
        alone = [engine.generate(p, max_new_tokens=4, logprobs=0)[0] for p in LONG]
        together = engine.generate(LONG, max_new_tokens=4, logprobs=0)
    for one, other in zip(alone, together, strict=True):
        assert [t.logprob for t in one.logprobs] == [t.logprob for t in other.logprobs]


def test_on_weights_on_disk(
    model: Path, lora: Path, with_it: list[list[int]], tmp_path: Path
) -> None:
    places = {"device_map": {"": "cpu", "model.layers": "disk"}}
    with jackfield.load(model, adapter=lora, **places) as engine:
        assert tokens(engine) == with_it
        assert engine.model.hf_device_map["model.layers"] == "disk"
        engine.disable_adapter()
        assert tokens(engine) != with_it
    adapted("llama", "dora").save_pretrained(tmp_path)
    for arguments in ({"adapter": lora, "merge_adapter": True}, {"adapter": tmp_path}):
        with pytest.raises(UsageError, match="cannot be offloaded"):
            jackfield.load(model, **arguments, **places)  # type: ignore[arg-type]


def flags(model: Any) -> dict[str, Any]:
    """What switching and loading could change of a live model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {
        "trained": [(n, p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()],
        "off": [m.disable_adapters for m in model.modules() if isinstance(m, BaseTunerLayer)],
        "modes": [m.training for m in model.modules()],
        "attention": model.config._attn_implementation,
    }


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_live_model_with_an_adapter(
    lora: Path, with_it: list[list[int]], without: list[list[int]], wrapped: bool
) -> None:
    if wrapped:
        live = adapted("llama").train()
        inner = live.get_base_model()
    else:
        inner = live = build("llama")
        live.load_adapter(str(lora), is_trainable=True)
    before = flags(inner)
    with jackfield.load(live) as engine:
        assert str(engine.plan.adapter) == "default (LORA of rank 4 on 10 modules)"
        assert tokens(engine) == with_it
        engine.disable_adapter()
        assert tokens(engine) == without
    assert flags(inner) == before
    with pytest.raises(UsageError, match="put the adapter on it yourself"):
        jackfield.load(live, adapter=lora)


def test_a_live_model_with_a_prompt_instead() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(CheckpointError, match="PREFIX_TUNING"):
        jackfield.load(peft.get_peft_model(build("llama"), config))


@contextmanager
def assert_refused(*words: str) -> Iterator[None]:
    with pytest.raises((CheckpointError, UsageError)) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    for word in words:
        assert word in message


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("jackfield.engine.reading.load_model", opened)


@pytest.mark.usefixtures("no_weights_are_read")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "type PREFIX_TUNING"),
        ({"peft_type": "LORRA"}, "did you mean 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is SEQ_CLS, not CAUSAL_LM"),
        ({"target_modules": ["wq"]}, "wq"),
        ({"r": 8}, "and has to be (8, 32)"),
        ({"target_modules": ["q_proj"]}, "has no place for"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj"]},
         "lacks model.layers.0.mlp.gate_proj.lora_A.weight and 3 more"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"a_key_of_next_year": 3}, "a_key_of_next_year"),
        ({"r": "many"}, "r is 'many', and has to be int"),
    ],
)  # fmt: skip
def test_configs(model: Path, mine: Path, changes: dict[str, Any], words: str) -> None:
    edit(mine, **changes)
    for act in (jackfield.plan, jackfield.load):
        with assert_refused(words, str(mine)):
            act(model, adapter=mine)


@pytest.mark.usefixtures("no_weights_are_read")
def test_an_adapter_for_another_architecture(model: Path, tmp_path: Path) -> None:
    adapted("gpt2", target_modules=["c_attn"]).save_pretrained(tmp_path / "gpt2")
    edit(tmp_path / "gpt2", base_model_name_or_path="openai/gpt2")
    with assert_refused("made for openai/gpt2", "does not fit LlamaForCausalLM", "c_attn"):
        jackfield.load(model, adapter=tmp_path / "gpt2")
    adapted("qwen3", target_modules=["q_proj"]).save_pretrained(tmp_path / "qwen3")
    with assert_refused(
        "does not fit LlamaForCausalLM", "q_proj.lora_B.weight is (64, 4)", "(32, 4)"
    ):
        jackfield.load(model, adapter=tmp_path / "qwen3")


class Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.usefixtures("no_weights_are_read")
def test_files(model: Path, mine: Path, tmp_path: Path) -> None:
    weights = mine / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-1], whole[:60], b"", b"\xff" * 50):
        weights.write_bytes(content)
        with assert_refused("adapter_model.safetensors", "fetch it again"):
            jackfield.load(model, adapter=mine)
    weights.unlink()
    with assert_refused("there are no weights"):
        jackfield.load(model, adapter=mine)
    (mine / "adapter_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with assert_refused("is a pickle (adapter_model.bin)"):
        jackfield.load(model, adapter=mine)
    assert not (tmp_path / "ran").exists()
    for text in ("{broken", "[]", "{}", "3"):
        (mine / "adapter_config.json").write_text(text)
        with assert_refused("adapter_config.json is not ", "fetch "):
            jackfield.load(model, adapter=mine)
    with assert_refused("has no adapter_config.json"):
        jackfield.load(model, adapter=model)
    with assert_refused("is not a folder"):
        jackfield.load(model, adapter=tmp_path / "nowhere")
    with assert_refused("cannot find the adapter 'somebody/nothing'"):
        jackfield.load(model, adapter="somebody/nothing")
    with assert_refused("adapter must be a folder or a hub id, not 3"):
        jackfield.load(model, adapter=3)  # type: ignore[arg-type]
    with assert_refused("merge_adapter=True merges an adapter, and none is given"):
        jackfield.load(model, merge_adapter=True)
    with assert_refused("an adapter and no model"):
        jackfield.load(mine)


def test_weights_that_an_adapter_brings_and_nobody_takes(model: Path, mine: Path) -> None:
    file = mine / "adapter_model.safetensors"
    more = {"base_model.model.model.embed_tokens.weight": torch.zeros(120, 32)}
    save_file({**load_file(file), **more}, file)
    with assert_refused("brings model.embed_tokens.weight, the embedding or head of the model"):
        jackfield.load(model, adapter=mine)


def test_a_quantizer_that_declares_no_adapters(model: Path, lora: Path, tmp_path: Path) -> None:
    """A plain LoRA is computed beside any layers; PEFT is needed for all else."""
    given, loha = QuantoConfig(weights="int8"), tmp_path
    adapted("llama", "loha").save_pretrained(loha)
    with pytest.raises(PlanError, match=r"takes no LOHA adapter on top \(adapters\)"):
        jackfield.load(model, adapter=loha, quantization=given)
    with pytest.raises(PlanError, match=r"cannot merge an adapter into its weights \(merges\)"):
        jackfield.load(model, adapter=lora, merge_adapter=True, quantization=given)
    with pytest.raises(PlanError, match=r"keeps all weights on one device \(offload\)"):
        jackfield.load(model, device_map="disk", quantization=given)


def test_the_command_line(cli: Any, tmp_path: Path) -> None:
    from jackfield.demo import MODEL_PATH

    demo = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    config = CONFIGS["lora"](task_type="CAUSAL_LM", target_modules=["q_proj"])
    peft.get_peft_model(demo, config).save_pretrained(tmp_path)
    flag = ("--adapter", str(tmp_path))
    done = cli("explain", "demo", *flag)
    assert done.code == 0, done.err
    assert "(LORA of rank 4 on 8 modules)" in "".join(done.out.split("\n")) or "LORA" in done.out
    assert cli("explain", "demo", *flag, "--json").json["plan"]["adapter"]["rank"] == 4
    done = cli("generate", "Once", "--max-new-tokens", "2", *flag, "--merge-adapter", "--json")
    assert done.json["report"]["adapter"]["state"] == "merged"
    assert done.err == ""
    cli("generate", "Once", "--merge-adapter").assert_failed(2, "none is given")
    cli("generate", "Once", "--adapter", "./nowhere").assert_failed(2, "is not a folder")
