"""Quantizers where processes share a model: each stores its own part of a matrix."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from two_ranks import Load, two_ranks

import jackfield
from jackfield.bridge import shared_layers
from jackfield.bridge.footprint import loaded_bytes
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.sharding import Shard
from jackfield.bridge.shared_layers import connect
from jackfield.bridge.shared_models import part_of, shared_out
from jackfield.contracts.quantizing import cut_groups, own_part
from jackfield.engine.engine import Engine
from jackfield.errors import CheckpointError, ExecutionError, PlanError, PluginError
from jackfield_plugins.quantizer.groupwise import loading
from jackfield_plugins.quantizer.groupwise.choosing import product
from jackfield_plugins.quantizer.groupwise.linear import GroupwiseLinear
from jackfield_plugins.quantizer.groupwise.quantize import quantize

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 98, "max_position_embeddings": 192,
    "initializer_range": 0.35, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"attention_bias": True, "mlp_bias": True},  # added once to a sum
    "Qwen2Config": {"tie_word_embeddings": True},
    "Phi3Config": {},  # outputs are gathered, inputs split
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},  # experts stay whole
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 4, [2, 7, 1, 8], [9, 9, 8]]
DOWN = "model.layers.0.mlp.down_proj"


def tiny(name: str = "LlamaConfig", **more: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(transformers, name)(**{**TINY, **FAMILIES[name], **more})
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a small model of a family; with `quantization`, as one process saved it."""
    made: dict[tuple[str, str | None], Path] = {}

    def of(name: str, quantization: str | None = None) -> Path:
        if (found := made.get((name, quantization))) is not None:
            return found
        path = made[name, quantization] = tmp_path_factory.mktemp(name)
        if quantization is None:
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(tiny(name))
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    nn.init.normal_(parameter)
            model.generation_config = transformers.GenerationConfig()
            model.save_pretrained(path)
        else:
            with jackfield.load(of(name), **chosen(quantization)) as engine:
                engine.model.save_pretrained(path)
        return path

    return of


@pytest.fixture(scope="module")
def pair() -> Iterator[Load]:
    with two_ranks() as load:
        yield load


def chosen(quantization: str) -> dict[str, Any]:
    dtype = "bfloat16" if "int4" in quantization else "float32"
    return {"quantization": quantization, "dtype": dtype}


def told(engine: Engine) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=16, temperature=0)]


def held(engine: Engine) -> int:
    return loaded_bytes(engine.model, engine.plan["quantizer"].registered)


def layers(engine: Engine) -> dict[str, GroupwiseLinear]:
    modules = engine.model.named_modules()
    return {path: m for path, m in modules if isinstance(m, GroupwiseLinear)}


LONG = ("Qwen2Config", "MixtralConfig")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in FAMILIES]
)
def test_tokens_are_those_of_one_process(
    pair: Load, folder: Callable[..., Path], name: str
) -> None:
    """In float32, and of a checkpoint that is stored so; bytes as planned."""
    with jackfield.load(folder(name), **chosen("int8-cpu")) as engine:
        wanted, whole = told(engine), layers(engine)
        bytes_of_one = held(engine)
    for path, asked in ((folder(name), chosen("int8-cpu")), (folder(name, "int8-cpu"), {})):
        with pair(path, **asked) as engine:
            assert told(engine) == wanted
            assert held(engine) == engine.plan.requirements.weight_bytes < 0.75 * bytes_of_one
            assert layers(engine).keys() == whole.keys()


@pytest.mark.parametrize("quantization", ["int8-cpu", "int4-cpu?group_size=32"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.one_in(4)
def test_parts_are_stored_as_in_the_whole(
    pair: Load, folder: Callable[..., Path], quantization: str, stored: bool
) -> None:
    """Number for number: outputs that are cut, and inputs that are cut between groups."""
    model, asked = folder("LlamaConfig"), chosen(quantization)
    with jackfield.load(model, **asked) as engine:
        whole = {path: layer.quantized() for path, layer in layers(engine).items()}
    name = quantization.partition("?")[0]
    path, asked = (folder("LlamaConfig", name), {}) if stored else (model, asked)
    with pair(path, **asked) as engine:
        for path, part in layers(engine).items():
            for found, wanted in zip(part.quantized(), whole[path], strict=True):
                assert torch.equal(found, wanted[: len(found), : found.shape[1]])
        sizes = {path: (m.out_features, m.in_features) for path, m in layers(engine).items()}
    assert sizes[DOWN] == (64, 96)
    assert sizes["model.layers.1.self_attn.k_proj"] == (16, 64)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "Phi3Config")) for n in FAMILIES]
)
def test_in_bfloat16_a_sum_over_processes_is_rounded_once_more(
    pair: Load, folder: Callable[..., Path], name: str
) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 1, "logprobs": 20, "temperature": 0}
    runs = []
    for load in (jackfield.load, pair):
        with load(folder(name), **chosen("int4-cpu")) as engine:
            runs.append(engine.generate(PROMPTS, **asked))
            assert held(engine) == engine.plan.requirements.weight_bytes
    for one, two in zip(*runs, strict=True):
        ours, theirs = (dict(seen.logprobs[0].top) for seen in (one, two))
        both = ours.keys() & theirs.keys()
        assert len(both) >= 15
        assert max(abs(ours[token] - theirs[token]) for token in both) < 0.4


def test_an_adapter_is_computed_beside_parts(
    pair: Load, folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = folder("LlamaConfig")
    found = AutoModelForCausalLM.from_pretrained(model)
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    found.add_adapter(peft.LoraConfig(r=3, lora_alpha=24, target_modules=["q_proj", "down_proj"]))
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    found.save_pretrained(tmp_path)
    asked = {**chosen("int8-cpu"), "adapter": str(tmp_path)}
    runs = []
    for load in (jackfield.load, pair):
        with load(model, **asked) as engine:
            runs.append(told(engine))
            with engine.disable_adapter():
                assert told(engine) != runs[-1]
    assert runs[0] == runs[1]


def test_a_part_that_is_not_that_of_the_file_is_found(
    pair: Load, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is rank 0 that stores another one's outputs in the place of its own."""
    monkeypatch.setattr(loading, "quantize", lambda w, **how: quantize(w.roll(5, 0), **how))
    wrong = pytest.raises(PluginError, match="its products are not those of the weights in the")
    with wrong, pair(folder("LlamaConfig"), **chosen("int8-cpu")):
        pass


@pytest.mark.long
def test_a_checkpoint_that_is_not_what_it_says_is_refused(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Its tensors are whole, and are compared with the whole model."""
    wrong = tmp_path / "wrong"
    shutil.copytree(folder("LlamaConfig", "int8-cpu"), wrong)
    config = (wrong / "config.json").read_text()
    (wrong / "config.json").write_text(config.replace('"group_size": 32', '"group_size": 64'))
    with pytest.raises(PlanError, match="has groups of 64 inputs, and tp_size=2 cuts one"):
        jackfield.plan(wrong, tp_size=2)
    (wrong / "config.json").write_text(config.replace('_size": 192', '_size": 128'))
    with pytest.raises(CheckpointError, match=r"is U8 \[64, 192\], and has to be U8 \[64, 128\]"):
        jackfield.load(wrong, tp_size=2)


def test_a_plan_knows_what_one_process_stores() -> None:
    one, two = (jackfield.plan(tiny(), tp_size=n, **chosen("int8-cpu")) for n in (1, 2))
    assert {weight.whole for weight in one.requirements.weights} == {None}
    whole = {weight.name: weight.linear for weight in one.requirements.weights}
    for weight in two.requirements.weights:
        assert weight.linear is None or weight.whole == whole[weight.name] != weight.linear
    assert two.requirements.plain_matrices is None
    assert two.requirements.weight_bytes < 0.75 * one.requirements.weight_bytes


def test_what_one_process_keeps_whole_stays_so() -> None:
    """Groups of 128 divide the inputs of down_proj alone, whose part has one."""
    config, saved = tiny(intermediate_size=256, head_dim=20), []
    for size in (1, 2):
        found = (
            jackfield.plan(config, tp_size=size, dtype="float32", quantization=name)
            for name in ("none", "int8-cpu?group_size=128")
        )
        plain, stored = (plan.requirements.weight_bytes for plan in found)
        saved.append(plain - stored)
    assert saved[0] == 2 * saved[1] == 2 * 64 * (256 * 4 - 256 - 2 * 2)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"intermediate_size": 160}, {}, r"int8-cpu \(has groups of 32 inputs, and tp_size=2 cuts"),
    ({"intermediate_size": 160}, {}, "each process has 80 of the 160 inputs of .*0.mlp.down_proj"),
    ({}, {"quantization": "int8-cpu?group_size=64"}, "o_proj; take a group size that divides 32,"),
    ({}, {"quantization": "int8-cpu?head=8"}, "head=8 stores the output head of one process, and"),
    ({}, {"quantization": "int4-cpu?head=4", "dtype": "bfloat16"}, "leave 'head' out"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "asked", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_be_other_numbers_is_refused_by_name(
    sizes: dict[str, Any], asked: dict[str, Any], why: str
) -> None:
    given = {**chosen("int8-cpu"), **asked}
    with pytest.raises(PlanError, match=why):
        jackfield.plan(tiny(**sizes), tp_size=2, **given)
    assert jackfield.plan(tiny(**sizes), **given)


def test_a_layer_that_only_transformers_can_share_is_replaced_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny()
    plan = dict(config.base_model_tp_plan) | {"layers.*.mlp.down_proj": "packed_rowwise"}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)
    why = "forms of its own .*a style of its own to share model.layers.0.mlp.down_proj"
    with pytest.raises(PlanError, match=why):
        jackfield.plan(config, tp_size=2, **chosen("int8-cpu"))
    assert jackfield.plan(config, tp_size=2).requirements.plain_matrices is not None


class Replaced(nn.Module):
    def __init__(self, outputs: int, inputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.ones(outputs)) if bias else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(given, self.weight, self.bias)


def test_a_replaced_module_that_cannot_be_connected_is_an_error() -> None:
    config, shard = tiny(), Shard(2, 0)
    part, model = part_of(config, shard), meta_model(config)
    weights = shared_out(config, jackfield.plan(config).requirements, shard).weights
    connect(model, part, weights, shard)  # nothing was replaced
    model.lm_head = Replaced(49, 64)
    with pytest.raises(ExecutionError, match="lm_head of LlamaForCausalLM was replaced by a Repl"):
        connect(model, part, weights, shard)


def test_uneven_outputs_are_put_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(2, 7)
    cut = [whole[:, :3], whole[:, 3:6], whole[:, 6:]]

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
        assert own.shape == (2, 3)
        for part, found in zip(parts, cut, strict=True):
            part[:, : found.shape[1]] = found

    monkeypatch.setattr(shared_layers.dist, "all_gather", all_gather)
    for rank, own in enumerate(cut):
        assert torch.equal(shared_layers._gathered(own, 7, Shard(3, rank)), whole)
        assert torch.equal(shared_layers._own(whole, Shard(3, rank)), own)


def test_a_process_may_have_no_output_of_a_layer() -> None:
    """Three outputs of four processes."""
    layer = GroupwiseLinear(64, 0, True, product("native"), bits=8, dtype=torch.float32)
    layer.set_weight(quantize(torch.empty(0, 64), bits=8))
    assert layer(torch.randn(3, 64)).shape == (3, 0)


def test_a_stranger_asks_which_groups_are_cut() -> None:
    one, two = (jackfield.plan(tiny(), tp_size=n).requirements for n in (1, 2))
    assert cut_groups(one, 64) == cut_groups(two, 32) == cut_groups(two, 128) == []
    assert "each process has 32 of the 64 inputs" in cut_groups(two, 64)[0]


def test_a_parameter_of_one_process_is_its_own_part() -> None:
    weight = nn.Linear(2, 2).weight
    assert own_part(weight) is weight
