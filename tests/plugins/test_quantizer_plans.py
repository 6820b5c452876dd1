"""What a plan takes, loading takes too, and the other way around."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import extras
import pytest
import torch
from transformers import BitsAndBytesConfig, GPTQConfig, LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield.errors import JackfieldError, PlanError

SIZES = ((64, 96), (48, 96), (40, 72), (34, 66))
OPTIONS = {
    "int4-cpu": ["", "head=4", "head=8", "group_size=64", "group_size=64&head=8",
                 "group_size=128&head=4", "head=8&kernel=native", "head=4&kernel=torch",
                 "kernel=torch"],
    "int8-cpu": ["", "head=8", "group_size=64", "group_size=128&head=8"],
    "bnb-4bit": ["", "double_quantization=true"],
    "bnb-8bit": [""],
    "torchao": ["", "group_size=32", "group_size=7", "type=int8-dynamic",
                "type=int4-weight-only", "type=int4-weight-only&group_size=64"],
}  # fmt: skip
SELECTIONS = [f"{name}?{text}".rstrip("?") for name, texts in OPTIONS.items() for text in texts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    found = {}
    for (hidden, inner), tied in itertools.product(SIZES, (False, True)):
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, vocab_size=50,
            max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.3,
        )  # fmt: skip
        found[hidden, inner, tied] = tmp_path_factory.mktemp("odd")
        LlamaForCausalLM(config).save_pretrained(found[hidden, inner, tied])
    return found


def refusal(act: Any, folder: Path, selection: Any) -> str | None:
    try:
        made = act(folder, quantization=selection, dtype="bfloat16")
    except JackfieldError as error:
        return str(error)
    if isinstance(made, jackfield.Engine):
        with made:
            made.generate([[1, 2, 3]], max_new_tokens=2)
    return None


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.one_in(4)
def test_a_plan_refuses_what_loading_refuses(folders: dict[Any, Path], selection: str) -> None:
    extras.needs("torchao" if "torchao" in selection else "bitsandbytes")
    for sizes, folder in folders.items():
        planned = refusal(jackfield.plan, folder, selection)
        assert refusal(jackfield.load, folder, selection) == planned, (selection, sizes)


def gptq(**fields: Any) -> GPTQConfig:
    tokens = {name: torch.ones(1, 8, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    return GPTQConfig(**{"bits": 4, "dataset": [tokens], **fields})


OBJECTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "gptq": ("gptqmodel", gptq),
    "gptq, groups of 32": ("gptqmodel", lambda: gptq(group_size=32)),
    "gptq, groups of 16": ("gptqmodel", lambda: gptq(group_size=16)),
    "gptq, whole rows": ("gptqmodel", lambda: gptq(group_size=-1)),
    "gptq, whole rows as they come": (
        "gptqmodel", lambda: gptq(group_size=-1, act_group_aware=False)),
    "gptq, no texts": ("gptqmodel", lambda: gptq(group_size=32, dataset=None)),
    "bnb-4bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True)),
    "bnb-8bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bnb, neither": ("bitsandbytes", BitsAndBytesConfig),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
@pytest.mark.one_in(4)
def test_a_plan_refuses_what_loading_refuses_of_a_config_object(
    folders: dict[Any, Path], name: str
) -> None:
    library, make = OBJECTS[name]
    extras.needs(library)
    for sizes, folder in folders.items():
        planned = refusal(jackfield.plan, folder, make())
        assert refusal(jackfield.load, folder, make()) == planned, (name, sizes)


def test_groups_that_do_not_divide_are_told_with_what_does() -> None:
    pytest.importorskip("gptqmodel", reason="needs jackfield[gptq]")
    with pytest.raises(PlanError, match=r"groups of 128 do not divide 192 .*'group_size=64'"):
        jackfield.plan("demo", quantization=gptq())


def test_a_config_that_names_no_method_is_told_what_it_lacks() -> None:
    with pytest.raises(PlanError, match="load_in_4bit=True or load_in_8bit=True"):
        jackfield.plan("demo", quantization=BitsAndBytesConfig())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_step_reads_a_head_that_is_a_copy_and_not_the_embedding(
    folders: dict[Any, Path], bits: int
) -> None:
    read = []
    for tied in (False, True):
        estimate = jackfield.estimate(
            str(folders[64, 96, tied]), quantization=f"int4-cpu?head={bits}", dtype="bfloat16",
            bandwidth="1GB/s", lengths=[16],
        )  # fmt: skip
        read.append(estimate.bytes_read(16))
    assert read[0] == read[1]
    embedding, head = 50 * 64 * 2, 64 * (64 * bits // 8 + 2 * 2)
    assert estimate.weight_bytes - embedding + 64 * 2 < read[1]
    assert read[1] < estimate.weight_bytes - embedding + head
