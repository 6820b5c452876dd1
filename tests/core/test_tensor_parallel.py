"""A model that two processes share says what one process says, over gloo on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from extras import needs
from transformers import AutoModelForCausalLM, AutoTokenizer
from two_ranks import UNEVEN, Load, two_ranks

import jackfield
from jackfield.bridge.footprint import loaded_bytes
from jackfield.demo import MODEL_PATH
from jackfield.engine.engine import Engine
from jackfield.errors import CheckpointError, ExecutionError, PlanError, RanksError, UsageError
from jackfield.parallel import meeting

TINY: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 98, "max_position_embeddings": 192,
    "initializer_range": 0.35, "tie_word_embeddings": False, "dtype": "float64",
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"vocab_size": 97 if UNEVEN else 98, "intermediate_size": 41},  # uneven parts
    "Qwen2Config": {"tie_word_embeddings": True},
    "Qwen3Config": {"head_dim": 20},
    "MistralConfig": {"sliding_window": 7},
    "Gemma2Config": {
        "head_dim": 12, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 7,
    },
    "Phi3Config": {},
    "GlmConfig": {"head_dim": 12},
    "CohereConfig": {"logit_scale": 0.5},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "GptOssConfig": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 12},
    "DeepseekV3Config": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12, "v_head_dim": 12,
    },
}  # fmt: skip
ALL = FAMILIES | EXPERTS
ROUTER = 16  # bytes of what DeepSeek's router adds, planned in float32, which float64 models widen

MORE = ("Qwen2Config", "Qwen3Config", "MistralConfig", "GlmConfig")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a small model of a family, with random weights in float64."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            torch.manual_seed(3)
            config = getattr(transformers, name)(**{**TINY, **ALL[name]})
            model = AutoModelForCausalLM.from_config(config).to(torch.float64)
            model.generation_config = transformers.GenerationConfig()  # the family's own EOS tokens
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return of


@pytest.fixture(scope="module")
def pair() -> Iterator[Load]:
    with two_ranks() as load:
        yield load


PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 4,
    [2, 7, 1, 8],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 4 + [7],
]


def story(engine: Engine) -> list[Any]:
    """Requests that come one after the other, share beginnings, draw, and are cancelled."""
    long = engine.submit(PROMPTS[0], max_new_tokens=24, temperature=0)
    first = next(iter(long))  # the others join while it decodes
    drawn = engine.submit(PROMPTS[1], max_new_tokens=16, temperature=1.0, top_k=20, seed=5)
    gone = engine.submit(PROMPTS[1], max_new_tokens=100)
    rest = engine.generate(PROMPTS[1:], max_new_tokens=12, temperature=0)
    gone.cancel()
    assert gone.result().finish_reason == "cancelled"
    assert first.token_ids == long.result().token_ids[: len(first.token_ids)]
    return [one.token_ids for one in (long.result(), drawn.result(), *rest)]


def told(model: Path, **arguments: Any) -> list[Any]:
    with jackfield.load(model, **arguments) as engine:
        return story(engine)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in MORE)) for n in FAMILIES]
)
@pytest.mark.one_in(2)
def test_tokens_are_those_of_one_process(
    pair: Load, folder: Callable[..., Path], name: str
) -> None:
    """With continuous batching, shared prefixes, draws and cancellations; bytes as planned."""
    model = folder(name)
    with pair(model) as engine:
        found = story(engine)
        needs, usage = engine.plan.requirements, engine.statistics().cache
        assert needs.tp_size == 2
        assert loaded_bytes(engine.model) == needs.weight_bytes
        assert usage is not None
        assert usage.prefix_tokens >= 32  # the third prompt begins as the first
        if len({*needs.windows}) == 1:
            page = usage.page_size * sum(needs.packed_numbers) * 8
            assert usage.num_bytes == usage.pages * page
    assert found == told(model)


@pytest.mark.skipif(not UNEVEN, reason="transformers 5.17 hands out no experts in float64")
@pytest.mark.parametrize(
    "name",
    ["MixtralConfig", *(pytest.param(name, marks=pytest.mark.long) for name in EXPERTS)],
)
def test_tokens_are_the_same_where_experts_are_handed_out(
    pair: Load, folder: Callable[..., Path], name: str
) -> None:
    """Steps of one token leave a process without any; half of the experts are here."""
    model = folder(name)
    with pair(model, expert_parallel=True) as engine:
        found = story(engine)
        needs = engine.plan.requirements
        assert loaded_bytes(engine.model) - needs.weight_bytes in (0, ROUTER)
    assert found == told(model)
    whole = jackfield.plan(model).requirements.weights
    assert all(
        2 * here.numbers == there.numbers
        for here, there in zip(needs.weights, whole, strict=True)
        if ".experts." in here.name
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name in FAMILIES),
        *((name, {"expert_parallel": True}) for name in ("MixtralConfig", *EXPERTS) if UNEVEN),
    ],
    ids=str,
)
def test_four_processes_say_the_same(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    torch.manual_seed(3)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    heads |= {"num_key_value_heads": 8} if name == "DeepseekV3Config" else {}
    config = getattr(transformers, name)(**{**TINY, **ALL[name], **heads})
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(tmp_path)
    with jackfield.load(tmp_path, tp_size=4, **more) as engine:
        found = story(engine)
        assert loaded_bytes(engine.model) - engine.plan.requirements.weight_bytes in (0, ROUTER)
    assert found == told(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"cache_implementation": "dynamic"},
        pytest.param(
            {"cache_implementation": "static", "attn_implementation": "sdpa"},
            marks=pytest.mark.long,
        ),
        pytest.param({"attn_implementation": "eager"}, marks=pytest.mark.long),
        pytest.param(
            {"attn_implementation": "sdpa", "cache_implementation": "paged?page_size=4"},
            marks=pytest.mark.long,
        ),
        {"decoding": "prompt_lookup"},
        pytest.param({"prefill_chunk_size": 5}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_other_backends_say_the_same(
    pair: Load, folder: Callable[..., Path], arguments: dict[str, Any]
) -> None:
    model = folder("Qwen2Config")
    with pair(model, **arguments) as engine:
        found = story(engine)
    assert found == told(model, **arguments)


def adapter(model: Path, folder: Path, *layers: str, seed: int = 0) -> str:
    """A LoRA with random matrices on these layers of a model."""
    needs("peft")
    from peft import LoraConfig

    torch.manual_seed(seed)
    found = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(r=3 + seed, lora_alpha=24, target_modules=list(layers))
    found.add_adapter(config)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    found.save_pretrained(folder)
    return str(folder)


JOINED = ("qkv_proj", "o_proj", "down_proj")
APART = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("LlamaConfig", APART),
        pytest.param("Gemma2Config", APART, marks=pytest.mark.long),
        ("Phi3Config", JOINED),
        pytest.param("MixtralConfig", ("q_proj", "o_proj"), marks=pytest.mark.long),
    ],
)
def test_adapters_that_requests_choose(
    pair: Load, folder: Callable[..., Path], tmp_path: Path, name: str, layers: tuple[str, ...]
) -> None:
    """Several in one batch, and none, on layers that are cut by columns, by rows, or gathered."""
    model = folder(name)
    adapters = {
        "two": adapter(model, tmp_path / "two", *layers[-2:], seed=1),
        "all": adapter(model, tmp_path / "all", *layers),
    }
    chosen = [{"adapter": one} if one else {} for one in ("all", None, "two")]
    asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "settings": chosen}
    with pair(model, adapters=adapters) as engine:
        found = [one.token_ids for one in engine.generate(PROMPTS, **asked)]
        assert loaded_bytes(engine.model) < engine.plan.requirements.weight_bytes
        with pytest.raises(UsageError, match="have the adapters that it was loaded with"):
            engine.load_adapter("more", adapters["two"])
    with jackfield.load(model, adapters=adapters) as engine:
        assert found == [one.token_ids for one in engine.generate(PROMPTS, **asked)]
        plain = engine.generate(PROMPTS, max_new_tokens=12, temperature=0)
    assert [a == b.token_ids for a, b in zip(found, plain, strict=True)] == [False, True, False]


def test_an_adapter_for_all_requests(
    pair: Load, folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = folder("Qwen2Config")
    lora = adapter(model, tmp_path / "lora", *APART)
    with pair(model, adapter=lora) as engine:
        found = story(engine)
        with engine.disable_adapter():
            plain = story(engine)
    assert plain != found == told(model, adapter=lora)
    assert plain == told(model)


def test_adapters_that_are_more_than_that_are_refused(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    needs("peft")
    from peft import LoraConfig

    model = folder("LlamaConfig")
    lora = Path(adapter(model, tmp_path / "lora", "q_proj"))
    with pytest.raises(UsageError, match="merge_adapter does not go with tp_size=2"):
        jackfield.plan(model, adapter=lora, tp_size=2, merge_adapter=True)
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(CheckpointError, match="lacks"):  # its magnitudes
        jackfield.plan(model, adapter=lora, tp_size=2)
    found = AutoModelForCausalLM.from_pretrained(model)
    found.add_adapter(LoraConfig(target_modules=["q_proj"], use_dora=True))
    found.save_pretrained(tmp_path / "dora")
    with pytest.raises(UsageError, match="is more than a LoRA of linear layers"):
        jackfield.plan(model, adapter=tmp_path / "dora", tp_size=2)


@pytest.mark.parametrize("cache", ["auto", "dynamic"])
def test_a_draft_model_runs_in_rank_0(
    pair: Load, folder: Callable[..., Path], tmp_path: Path, cache: str
) -> None:
    """Its drafts are verified by all ranks; one draws them by the weights of the model itself."""
    model, draft = folder("Qwen2Config"), tmp_path / "draft"
    shutil.copytree(model, draft)
    asked = {"decoding": "assisted", "cache_implementation": cache}
    with pair(model, assistant_model=str(draft), **asked) as engine:
        found, drafted = story(engine), engine.statistics().speculation
        assert drafted is not None
        assert drafted.accepted > 20
    assert found == told(model, cache_implementation=cache)


def test_preempted_requests_say_the_same(pair: Load, folder: Callable[..., Path]) -> None:
    model, few = folder("LlamaConfig"), "paged?num_tokens=72&page_size=4"
    prompts = [[n, 5, 9, 2, 6] * 3 for n in range(6)]
    with pair(model, cache_implementation=few) as engine:
        found = [one.token_ids for one in engine.generate(prompts, max_new_tokens=24)]
        assert engine.statistics().preemptions > 0
    with jackfield.load(model) as engine:
        assert found == [one.token_ids for one in engine.generate(prompts, max_new_tokens=24)]


def test_a_shared_model_that_somebody_else_calls_says_so_at_once(
    pair: Load, folder: Callable[..., Path]
) -> None:
    """Rather than to wait for processes that do not compute."""
    ids = torch.tensor([[5, 6, 7]])
    with pair(folder("LlamaConfig")) as engine:
        model: Any = engine.model
        calls = (
            lambda: model.generate(ids, max_new_tokens=2),
            lambda: model(ids),
            lambda: model.model(ids),
        )
        for call in calls:
            with pytest.raises(ExecutionError, match="called by somebody else than its engine"):
                call()
        assert len(engine.generate([5, 6, 7], max_new_tokens=4)[0].token_ids) == 4


def test_beams_say_the_same(pair: Load, folder: Callable[..., Path]) -> None:
    model, asked = folder("MistralConfig"), {"max_new_tokens": 12, "num_beams": 3}
    with pair(model, decoding="beam") as engine:
        found = [one.token_ids for one in engine.generate(PROMPTS, **asked)]
    with jackfield.load(model, decoding="beam") as engine:
        assert found == [one.token_ids for one in engine.generate(PROMPTS, **asked)]


def test_a_plan_that_is_wrong_is_refused(
    pair: Load, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Shapes and weights are right, and one sum too many is taken, by the model's own files."""
    wrong = tmp_path / "wrong"
    shutil.copytree(folder("LlamaConfig"), wrong)
    config = json.loads((wrong / "config.json").read_text())
    plan = dict(transformers.LlamaConfig.base_model_tp_plan)
    config["base_model_tp_plan"] = {**plan, "layers.*.input_layernorm": "all_reduce"}
    (wrong / "config.json").write_text(json.dumps(config))
    refused = pytest.raises(PlanError, match="says something else where processes share it")
    with refused, pair(wrong):
        pass


def test_a_cache_pool_has_one_size_in_all_ranks(pair: Load, folder: Callable[..., Path]) -> None:
    """By the free memory of this machine, of which each has half."""
    with pair(folder("LlamaConfig"), cache_implementation="paged?memory=0.001") as engine:
        planned, usage = engine.plan.memory(), engine.statistics().cache
        assert planned is not None
        assert usage is not None
        assert 0.5 < usage.num_bytes / planned.available < 2
        assert len(engine.generate([1, 2, 3], max_new_tokens=4)[0].token_ids) == 4


def test_ranks_that_cannot_meet_say_where(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that another program has, an address where nobody answers, a rank that never comes."""
    model = folder("LlamaConfig")
    monkeypatch.setattr(meeting, "JOIN_WITHIN", 1.0)
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(ExecutionError, match=f"cannot meet at 127.0.0.1:{port}"):
                jackfield.load(model, tp_plan="auto")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ExecutionError, match=r"cannot meet at 127|rank 1 of 2 did not come"):
            jackfield.load(model, tp_plan="auto")
    assert time.monotonic() - begin < 20
    assert torch.distributed.is_initialized() is False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_rank_that_is_killed_ends_every_request_with_the_cause(
    folder: Callable[..., Path],
) -> None:
    """Here by processes that `load` starts itself; none of them is left behind."""
    before = children()
    with jackfield.load(folder("LlamaConfig"), tp_size=2) as engine:
        (other,) = children() - before
        requests = [engine.submit([5, 6, n], max_new_tokens=150) for n in range(3)]
        next(iter(requests[0]))
        begin = time.monotonic()
        os.kill(other, signal.SIGKILL)
        for request in requests:
            with pytest.raises(RanksError, match=r"rank 1 of the 2 .*by SIGKILL.*load the model"):
                request.result(timeout=20)
        assert time.monotonic() - begin < 10
        with pytest.raises(RanksError, match="by SIGKILL"):
            engine.generate([1])
        assert engine.closed
        assert not engine.health().ready
    assert children() == before
    assert torch.distributed.is_initialized() is False


def children(of: int | None = None) -> set[int]:
    """The processes that this one, or another one, has started and that run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == (of or os.getpid()) and state != "Z":
                found.add(int(path.parent.name))
    return found


SCRIPT = """
import sys, jackfield
with jackfield.load(sys.argv[1], tp_plan="auto") as engine:
    print("tokens", engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids, flush=True)
    if sys.argv[2] == "hang":
        engine.generate([5, 6, 7], max_new_tokens=170, seed=1)
        while True:
            engine.generate([5, 6, 7], max_new_tokens=170, seed=1)
print("rank 0 goes on", flush=True)
"""


@pytest.mark.long
def test_one_script_runs_in_all_processes_of_torchrun(
    tmp_path: Path, folder: Callable[..., Path]
) -> None:
    script, model = tmp_path / "script.py", folder("LlamaConfig")
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, str(script), str(model), "end"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    with jackfield.load(model) as engine:
        wanted = engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids
    assert (done.returncode, done.stdout) == (0, f"tokens {wanted}\nrank 0 goes on\n"), done.stderr


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_no_process_stays_where_rank_0_is_killed(
    tmp_path: Path, folder: Callable[..., Path]
) -> None:
    """Rank 0 started the other by itself, so that nobody else ends it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('tp_plan="auto"', "tp_size=2"))
    with subprocess.Popen(
        [sys.executable, str(script), str(folder("LlamaConfig")), "hang"],
        stdout=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith(b"tokens")
        (other,) = children(run.pid)
        run.kill()
    begin = time.monotonic()
    while Path(f"/proc/{other}").exists() and time.monotonic() - begin < 30:
        time.sleep(0.1)
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.long
def test_the_command_line_starts_the_processes(speaking: Path) -> None:
    run = [
        sys.executable,
        "-m",
        "jackfield",
        "generate",
        "--model",
        str(speaking),
        "--json",
        "Once",
    ]
    texts = []
    for more in ([], ["--tp", "2"]):
        done = subprocess.run([*run, *more], capture_output=True, text=True, check=True)
        texts.append(json.loads(done.stdout)["text"])
        assert "rank 1" not in done.stderr
    assert texts[0] == texts[1] != ""


def test_structures_are_followed(pair: Load, speaking: Path) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 4}
    wished = [{"regex": "[a-f]{8}"}, {"choices": ["left", "right"]}]
    with pair(speaking) as engine:
        found = [one.text for one in engine.generate(["a", "b"], settings=wished, **asked)]
    with jackfield.load(speaking) as engine:
        again = [one.text for one in engine.generate(["a", "b"], settings=wished, **asked)]
    assert found == again
    assert found[1] in ("left", "right")


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer of the one inside the package."""
    folder, tokenizer = (
        tmp_path_factory.mktemp("speaking"),
        AutoTokenizer.from_pretrained(MODEL_PATH),
    )
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**TINY, "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).to(torch.float64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
