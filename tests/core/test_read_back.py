"""Quantizers of strangers that do not do what they said: each is found before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import extras
import pytest
import torch
from families import build
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield.bridge.read_back import check_read
from jackfield.bridge.requirements import requirements_of
from jackfield.bridge.source import find
from jackfield.bridge.weights import tensors_in
from jackfield.contracts import NoOptions, Quantizer, QuantizerCapabilities, Requirements
from jackfield.contracts.quantizing import mixed_bytes
from jackfield.errors import CheckpointError, JackfieldError, PluginError
from jackfield.registry.backends import Choice, Registered

Model = Any


class Int8Linear(nn.Module):
    """A scale a row, in place of a linear layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden @ (self.weight * self.scale).T.to(hidden.dtype)


class Stranger(Quantizer):
    name = "int8-of-mine"
    capabilities = QuantizerCapabilities()

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        return mixed_bytes(requirements, lambda w: w.linear and w.numbers + 4 * w.linear[0])

    def make_config(self, context: Any) -> None:
        return None

    def converted(self, module: nn.Module) -> bool:
        return isinstance(module, Int8Linear)


QUANTIZER = Registered(Stranger(), "strange-weights", "1.2", "strange")
LAYER = "model.layers.1.self_attn.q_proj"


def layer(model: Model, path: str = LAYER) -> Any:
    return model.get_submodule(path)


def no_fault(model: Model) -> None:
    del model


def placeholder(model: Model) -> None:
    """What comes of small numbers that are stored as int8 without a scale."""
    layer(model).weight = layer(model).weight.float().mul(0.001).to(torch.int8)


def forgotten(model: Model) -> None:
    weight = torch.randn(32, 32)
    plain = nn.Linear(32, 32, bias=False)
    plain.weight.data = weight
    model.set_submodule(LAYER, plain)


def swapped(model: Model) -> None:
    one, other = LAYER, LAYER.replace("q_proj", "o_proj")
    first, second = layer(model, one), layer(model, other)
    model.set_submodule(one, second)
    model.set_submodule(other, first)


def of_another_layer(model: Model) -> None:
    model.set_submodule(LAYER, layer(model, LAYER.replace("layers.1", "layers.0")))


def too_few_rows(model: Model) -> None:
    layer(model).weight, layer(model).scale = layer(model).weight[:-1], layer(model).scale[:-1]


def transposed(model: Model) -> None:
    layer(model).weight = layer(model).weight.T.contiguous()


def of_other_sign(model: Model) -> None:
    layer(model).scale = -layer(model).scale


def ten_times(model: Model) -> None:
    layer(model).scale = 10 * layer(model).scale


def not_finite(model: Model) -> None:
    layer(model).scale[3] = float("nan")


def on_meta(model: Model) -> None:
    layer(model).to("meta")


def in_double(model: Model) -> None:
    forward = layer(model).forward
    layer(model).forward = lambda hidden: forward(hidden).double()


def in_a_tuple(model: Model) -> None:
    forward = layer(model).forward
    layer(model).forward = lambda hidden: (forward(hidden), None)


def raises(model: Model) -> None:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("\x1b[31mno\nkernel")

    layer(model).forward = forward


def embedding_too(model: Model) -> None:
    """As where the head is stored and the embedding is tied to it."""
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(embedding.weight.to(torch.int8), requires_grad=False)


def norm_left_empty(model: Model) -> None:
    model.model.norm.weight.data.zero_()


def norm_on_meta(model: Model) -> None:
    model.model.norm.to("meta")


def head_of_another_size(model: Model) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:-1])


FAULTS: dict[Callable[[Model], None], str] = {
    placeholder: "its products are not those of the weights in the file",
    forgotten: "it is not stored as was planned, but is a Linear",
    swapped: "its products are not those of the weights in the file",
    of_another_layer: "its products are not those of the weights in the file",
    too_few_rows: "[8, 31] on cpu, where torch.float32 [8, 32] on cpu is due",
    transposed: "its products are not those of the weights in the file",
    of_other_sign: "its products are not those of the weights in the file",
    not_finite: "it has a number that is not finite, and the file has none",
    ten_times: "its products are not those of the weights in the file",
    on_meta: "its tensors are on meta",
    in_double: "it returns torch.float64",
    in_a_tuple: "it returns tuple",
    raises: "it raised RuntimeError",
    embedding_too: "it is torch.int8",
    norm_left_empty: "it does not hold the numbers of the file",
    norm_on_meta: "it has no numbers",
    head_of_another_size: "numbers of floating point are due",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, max_position_embeddings=64, initializer_range=0.3,
        tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def checked(folder: Path, fault: Callable[[Model], None]) -> None:
    """What is done with a model that the stranger has read, `fault` and all."""
    source = find(folder, None)
    needs = requirements_of(source, dtype="float32", device="cpu", deterministic=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            model.set_submodule(path, Int8Linear(module.weight.detach()))
    fault(model)
    check_read(model, Choice(QUANTIZER, NoOptions(), "named"), needs, tensors_in(source))


def test_one_that_does_what_it_said(folder: Path) -> None:
    checked(folder, no_fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_names_the_layer_and_whose_it_is(
    folder: Path, fault: Callable[[Model], None]
) -> None:
    with pytest.raises(PluginError) as caught:
        checked(folder, fault)
    said = str(caught.value)
    assert FAULTS[fault] in said
    assert said.startswith("quantizer 'int8-of-mine' of strange-weights 1.2: did not store ")
    assert said.isprintable()
    assert any(name in said for name in ("self_attn", "embed_tokens", "norm", "lm_head"))


def test_a_file_whose_numbers_are_not_finite(folder: Path, tmp_path: Path) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    layer(model).weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{LAYER} in .*not a number; fetch the model again"):
        checked(tmp_path, no_fault)


@pytest.mark.parametrize("name", ["bnb-8bit", "bnb-4bit", "torchao", "int4-cpu"])
def test_a_quantizer_whose_layer_is_spoilt_does_not_load(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is on the way of `load`, for those that quantize while they read."""
    extras.needs("torchao" if name == "torchao" else "bitsandbytes")
    from jackfield.engine import reading

    def spoilt(*arguments: Any) -> Any:
        model = load_model(*arguments)
        model.set_submodule(LAYER, nn.Linear(32, 32, bias=False, dtype=model.dtype))
        return model

    load_model = reading.load_model
    monkeypatch.setattr(reading, "load_model", spoilt)
    with pytest.raises(JackfieldError, match=f"'{name}' of .* did not store {LAYER}"):
        jackfield.load(folder, quantization=name)


@pytest.mark.parametrize("family", ["llama4"])  # its router is a linear that chooses experts, too
def test_a_models_own_kind_of_linear_is_asked_for_its_product(family: str, tmp_path: Path) -> None:
    extras.needs("torchao")
    build(family, torch.float32).save_pretrained(tmp_path)
    with jackfield.load(
        tmp_path, quantization="torchao", cache_implementation="dynamic", dtype="float32"
    ) as engine:
        module = layer(engine.model, "model.layers.0.feed_forward.router")
        assert type(module.weight).__module__.startswith("torchao")
        assert len(engine.generate([5, 6, 7], max_new_tokens=3)[0].token_ids) == 3
