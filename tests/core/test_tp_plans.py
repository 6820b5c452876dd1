"""A model that processes share, as it is planned: what one of them has, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from two_ranks import UNEVEN

import jackfield
from jackfield.bridge import sharding
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.sharding import Shard, check_adapted, check_loaded, sharded
from jackfield.bridge.shared_models import part_of
from jackfield.contracts.requirements import BYTES
from jackfield.engine.sharing import agree
from jackfield.errors import ExecutionError, JackfieldError, PlanError, UsageError
from jackfield.registry.discovery import registry

TINY: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 102, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
#: config -> whether transformers shares out its heads
FAMILIES = {
    "LlamaConfig": True, "Qwen2Config": True, "Qwen3Config": True, "MistralConfig": True,
    "Gemma2Config": True, "CohereConfig": True, "GlmConfig": True, "MixtralConfig": True,
    "Phi3Config": False, "Olmo2Config": False,
}  # fmt: skip


def tiny(name: str, **more: Any) -> PreTrainedConfig:
    if name in ("Gemma2Config", "GlmConfig"):
        more = {"head_dim": 12, **more}
    config: PreTrainedConfig = getattr(transformers, name)(**{**TINY, **more})
    return config


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(4)
def test_a_process_has_its_part_of_weights_heads_and_keys(name: str) -> None:
    """Every matrix that a plan names is cut in two; what is not cut is told as it is."""
    config = tiny(name)
    whole, half = (jackfield.plan(config, tp_size=n).requirements for n in (1, 2))
    kv_heads = 1 if FAMILIES[name] else 2
    assert (half.num_attention_heads, half.num_key_value_heads) == (2 * kv_heads, kv_heads)
    assert [keys[0] for keys, _ in half.packed_shapes] == [kv_heads] * 2
    assert half.kv_numbers == half.packed_numbers
    assert sum(half.kv_numbers) * (2 // kv_heads) == sum(whole.kv_numbers)
    uncut = sum(
        BYTES[half.dtype] * one.numbers
        for one, part in zip(whole.weights, half.weights, strict=True)
        if one.numbers == part.numbers
    )
    assert whole.weight_bytes - half.weight_bytes == (whole.weight_bytes - uncut) // 2
    named = "model.embed_tokens" in meta_model(config)._tp_plan  # else all have them: 5.17
    embeddings = 0 if named else BYTES[half.dtype] * config.vocab_size * config.hidden_size
    assert embeddings < uncut < embeddings + 0.1 * whole.weight_bytes or name == "MixtralConfig"


def test_parts_of_all_ranks_are_the_whole() -> None:
    """Also where a dimension does not divide: the last rank has less of it."""
    config = tiny("LlamaConfig", vocab_size=97 if UNEVEN else 98, intermediate_size=41)
    whole = dict(meta_model(config).named_parameters())
    parts = [dict(part_of(config, Shard(2, rank)).named_parameters()) for rank in (0, 1)]
    for name, parameter in whole.items():
        shapes = [tuple(part[name].shape) for part in parts]
        if shapes[0] == shapes[1] == tuple(parameter.shape):
            assert parameter.dim() == 1 or "embed" in name
            continue
        assert sum(map(math.prod, shapes)) == parameter.numel(), name
    assert [part["model.layers.0.mlp.down_proj.weight"].shape[1] for part in parts] == [21, 20]


def test_a_tied_head_stays_tied() -> None:
    config = tiny("LlamaConfig", tie_word_embeddings=True)
    half = part_of(config, Shard(2, 0))
    assert half.get_output_embeddings().weight is half.get_input_embeddings().weight


def test_a_tied_weight_that_is_cut_in_two_ways_is_refused() -> None:
    model = meta_model(tiny("LlamaConfig", tie_word_embeddings=True))
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(PlanError, match="otherwise than the weight that it is tied to"):
        sharded(model, Shard(2, 0))


def test_an_unknown_style_is_refused_by_name() -> None:
    model = meta_model(tiny("LlamaConfig"))
    model._tp_plan = {**model._tp_plan, "model.norm": "sequence_parallel"}
    with pytest.raises(PlanError, match="the style 'sequence_parallel', which jackfield does not"):
        sharded(model, Shard(2, 0))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(4)
def test_uneven_outputs_are_refused_where_transformers_takes_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the transformers that is here, and by one that asks for equal parts as 5.17 does."""
    odd, why = tiny(name, vocab_size=97), "does not divide the 97 outputs of lm_head of .*or load"
    if UNEVEN:
        assert jackfield.plan(odd, tp_size=2).requirements.tp_size == 2
        gathers = sharding.ALL_PARALLEL_STYLES["colwise_gather_output"]
        monkeypatch.setattr(gathers, "validate_param", _equal_parts)
    with pytest.raises(PlanError, match=why):
        jackfield.plan(odd, tp_size=2)
    assert jackfield.plan(tiny(name, intermediate_size=41), tp_size=2).requirements.tp_size == 2


def _equal_parts(module: torch.nn.Module, own: str, mesh: Any, name: str) -> None:
    if module.get_parameter(own).shape[-2] % mesh.size():
        raise ValueError(f"{name} must be divisible")


@pytest.mark.parametrize("style", sorted(sharding._KNOWN))
def test_a_style_of_another_transformers_is_refused_by_name(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's files may name styles that are newer than what is installed."""
    model = meta_model(tiny("LlamaConfig"))
    model._tp_plan = {**model._tp_plan, "model.norm": style}
    without = {name for name in sharding.ALL_PARALLEL_STYLES if name != style}
    monkeypatch.setattr(sharding, "ALL_PARALLEL_STYLES", without)
    with pytest.raises(PlanError, match=f"'{style}', which that transformers does not know"):
        sharding.check_plan(model, Shard(2, 0))


#: config with experts of its own -> what makes them four
EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 4},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "GptOssConfig": {"num_local_experts": 4, "head_dim": 12},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_handed_out_as_a_whole(name: str) -> None:
    """Each process has half of them, and of all else what it has otherwise (with 5.17: all)."""
    config = tiny(name, **EXPERTS[name])
    whole, cut, half = (
        {weight.name: weight.numbers for weight in needs.weights}
        for needs in (
            jackfield.plan(config, tp_size=size, expert_parallel=experts).requirements
            for size, experts in ((1, False), (2, False), (2, True))
        )
    )
    experts = {weight for weight in whole if ".experts." in weight}
    assert experts
    assert all(2 * half[weight] == whole[weight] for weight in experts)
    others = cut if sharding._BESIDE else whole
    assert {w: n for w, n in half.items() if w not in experts} == {
        w: n for w, n in others.items() if w not in experts
    }
    part = dict(part_of(config, Shard(2, 1, experts=True)).named_parameters())
    shapes = {name: parameter.shape for name, parameter in meta_model(config).named_parameters()}
    for weight in experts:
        assert part[weight].shape == (2, *shapes[weight][1:])


def test_an_estimate_counts_experts_where_they_are() -> None:
    """A process reads as much whether it has a part of each expert, or each of a part of them."""
    config = tiny("MixtralConfig", num_local_experts=8, intermediate_size=400)
    cut, whole = (
        jackfield.estimate(
            config, device_memory="1GB", prompt_flops=True, tp_size=2, expert_parallel=experts
        )
        for experts in (False, True)
    )
    ours = [found.plan.requirements.weight_bytes - found.reads.unread(1) for found in (cut, whole)]
    if sharding._BESIDE:  # attentions are shared out, too
        assert ours[0] == ours[1]
        assert cut.prompt is not None
        assert whole.prompt is not None
        assert cut.prompt.of(128) == whole.prompt.of(128)
    assert whole.plan.to_dict()["expert_parallel"] is True
    assert "some of its experts as a whole" in str(whole.plan)


def test_experts_that_cannot_be_handed_out_are_refused_by_name() -> None:
    three = tiny("MixtralConfig", num_local_experts=3)
    assert jackfield.plan(three, tp_size=2).requirements.tp_size == 2
    with pytest.raises(PlanError, match="tp_size=2 does not divide the 3 experts of Mixtral"):
        jackfield.plan(three, tp_size=2, expert_parallel=True)
    with pytest.raises(
        PlanError, match=r"no expert parallel plan of LlamaForCausalLM.*drop expert"
    ):
        jackfield.plan(tiny("LlamaConfig"), tp_size=2, expert_parallel=True)
    with pytest.raises(UsageError, match="and there is one; add tp_size=N, or drop it"):
        jackfield.plan(three, expert_parallel=True)
    with pytest.raises(UsageError, match="expert_parallel is True or False, not 'no'"):
        jackfield.plan(three, tp_size=2, expert_parallel="no")  # type: ignore[arg-type]


def test_experts_that_nobody_brings_tokens_to_are_refused() -> None:
    """transformers carries out such a plan in part, or not at all."""
    model = meta_model(tiny("MixtralConfig", num_local_experts=4))
    model._ep_plan = {"model.layers.*.mlp.experts.down_proj": "grouped_gemm"}
    with pytest.raises(PlanError, match="that it carries out"):
        sharded(model, Shard(2, 0, experts=True))


def test_memory_is_that_of_one_process() -> None:
    config = tiny("LlamaConfig")
    one, half = (
        jackfield.plan(config, tp_size=n, cache_implementation="paged?num_tokens=512")
        for n in (1, 2)
    )
    here, there = one.memory(), half.memory()
    assert here is not None
    assert there is not None
    assert (here.available, here.bytes_per_token) == (
        2 * there.available,
        2 * there.bytes_per_token,
    )
    assert half.to_dict()["tp_size"] == 2
    assert "shared by 2 processes; this one has 2 query heads and 1 key/value heads" in str(half)
    free = jackfield.plan(config, cache_implementation="dynamic").memory()
    shared = jackfield.plan(config, tp_size=2, cache_implementation="dynamic").memory()
    assert free is not None
    assert shared is not None
    assert 0.4 < shared.available / free.available < 0.6  # ranks of one CPU share it


def test_an_estimate_is_that_of_one_process() -> None:
    config = tiny("LlamaConfig", hidden_size=96, intermediate_size=400)
    one, half = (jackfield.estimate(config, device_memory="1GB", tp_size=n) for n in (1, 2))
    assert half.plan.requirements.weight_bytes < 0.6 * one.plan.requirements.weight_bytes
    read = [found.plan.requirements.weight_bytes - found.reads.unread(1) for found in (one, half)]
    assert 0.4 < read[1] / read[0] < 0.6
    assert half.steps[-1].prefill < one.steps[-1].prefill


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 3}, "tp_size=3 does not divide the 2 key/value heads of Llama.*; use 2$"),
    ({"tp_size": 0}, "tp_size is a number of processes from 1 on, not 0"),
    ({"tp_size": True}, "not True"),
    ({"tp_size": 2, "tp_plan": "colwise"}, "write tp_plan='auto'"),
    ({"tp_plan": "auto"}, "was not started so; say how many with tp_size=N"),
    ({"quantization": "bnb-4bit"}, r"stores layers that are whole \(tensor_parallel\).*use 'none'"),
    ({"compile": "native"}, "compiles steps of one process, and tp_size=2 shares them"),
    ({"compile": "inductor"}, "compiles steps of one process"),
    ({"kernels": "cpu-rms-norm"}, "replaces layers that are whole"),
    ({"cache_implementation": "paged?swap=yes"}, "swap=true goes by the free memory of one"),
    ({"deterministic": True}, "deterministic does not go with tp_size=2"),
    ({"adapter": "somewhere", "merge_adapter": True}, "merge_adapter does not go with tp_size=2"),
    ({"max_memory": {"cpu": "1GB"}}, "max_memory does not go with tp_size=2"),
    ({"device_map": "cuda:1"}, "each process has a device of its own, here cpu"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_shared_is_refused_by_name(arguments: dict[str, Any], why: str) -> None:
    given = {"tp_size": 2, **arguments} if arguments != {"tp_plan": "auto"} else arguments
    with pytest.raises(JackfieldError, match=why):
        jackfield.plan(tiny("LlamaConfig"), **given)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            lambda: transformers.GPT2Config(n_embd=48, n_head=4, n_layer=2),
            "no tensor parallel plan",
        ),
        (
            lambda: transformers.HrmTextConfig(
                **TINY, head_dim=12, H_cycles=1, L_cycles=1, prefix_lm=True
            ),
            "reads a prompt in both directions",
        ),
        (lambda: tiny("LlamaConfig", num_key_value_heads=1), "the 1 key/value heads.*one process"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(
    config: Callable[[], PreTrainedConfig], why: str
) -> None:
    with pytest.raises(PlanError, match=why):
        jackfield.plan(config(), tp_size=2)


def test_live_models_are_not_shared() -> None:
    model = AutoModelForCausalLM.from_config(tiny("LlamaConfig"))
    with pytest.raises(UsageError, match="a live model is not; give the model's folder"):
        jackfield.load(model, tp_size=2)


def test_verification_has_no_whole_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="verify does not go with tp_size=2"):
        jackfield.load("demo", tp_size=2, verify=True)


def test_torchrun_and_the_argument_say_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="tp_size=4, and torchrun started 2 processes"):
        jackfield.plan(tiny("LlamaConfig"), tp_size=4)
    auto = jackfield.plan(tiny("LlamaConfig", intermediate_size=41), tp_plan="auto")
    first = jackfield.plan(tiny("LlamaConfig", intermediate_size=41), tp_size=2)
    assert auto.requirements.weight_bytes == first.requirements.weight_bytes  # both are rank 1


def test_weights_that_came_in_other_shapes_are_an_error() -> None:
    config = tiny("LlamaConfig")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    part = part_of(config, Shard(2, 0))
    pairs = zip(model.named_parameters(), part.named_parameters(), strict=True)
    name, shape = next((name, p.shape) for (name, p), (_, own) in pairs if p.shape != own.shape)
    came = re.escape(f"{name} of LlamaForCausalLM came as {list(shape)}")
    with pytest.raises(ExecutionError, match=f"{came}, where its tensor parallel plan"):
        check_loaded(model, part)


class Others:
    """Ranks, of which the others answer with a changed record."""

    def __init__(self, change: Callable[[dict[str, Any]], None]) -> None:
        self._change = change

    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        import copy

        other = copy.deepcopy(record)
        self._change(other)
        return [record, other]


def plugins_of(record: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = record["plugin"]
    return found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: None, None),
        (lambda r: r.update(torch="2.0"), r"torch is 2\.0 on rank 1 and "),
        (lambda r: plugins_of(r).update({"other kernels": "1.0, loaded"}),
         "plugin other kernels is 1.0, loaded on rank 1 and missing on rank 0"),
        (lambda r: plugins_of(r).pop(next(iter(plugins_of(r)))), "is missing on rank 1 and "),
        (lambda r: r["backend"]["cache"].update(version="0"), "backend cache version is 0 on rank"),
        (lambda r: r["backend"].pop("cache"), "backend cache is missing on rank 1 and there on"),
        (lambda r: r.update({"the model's config": "x"}), "the model's config is x on rank 1"),
        (lambda r: r["adapter"].update(fr="x"), "adapter fr is x on rank 1 and "),
        (lambda r: r.update(expert_parallel=True), "expert_parallel is True on rank 1 and False"),
    ],
)  # fmt: skip
def test_processes_have_the_same_installed(tmp_path: Path, change: Any, why: str | None) -> None:
    (lora := tmp_path / "lora").mkdir()
    (lora / "adapter_model.safetensors").write_bytes(b"weights")
    config = tiny("LlamaConfig")
    plan, ranks = jackfield.plan(config), Others(change)
    loras = {"fr": SimpleNamespace(folder=lora)}
    job: Any = SimpleNamespace(
        source=SimpleNamespace(config=config), held=lambda *_: SimpleNamespace(loras=loras)
    )
    if why is None:
        agree(ranks, plan, job, registry())  # type: ignore[arg-type]
        return
    with pytest.raises(
        UsageError, match=f"must have the same installed, and be told the same: .*{why}"
    ):
        agree(ranks, plan, job, registry())  # type: ignore[arg-type]


def test_an_adapter_of_a_layer_in_several_pieces_is_refused() -> None:
    model: Any = SimpleNamespace(_tp_plan={"layers.*.mlp.gate_up": "packed_colwise"})
    check_adapted(model, ["layers.0.mlp.down", "norm"], Shard(2, 0))
    with pytest.raises(
        PlanError, match=r"changes layers\.7\.mlp\.gate_up, of which each of tp_size=2"
    ):
        check_adapted(model, ["layers.7.mlp.gate_up"], Shard(2, 0))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 3, 8, 41, 48])
def test_parts_follow_one_another(size: int, length: int) -> None:
    parts = [
        (shard.begin(length), shard.part(length))
        for shard in map(Shard, [size] * size, range(size))
    ]
    covered = [n for begin, part in parts for n in range(begin, begin + part)]
    assert covered == list(range(length))
