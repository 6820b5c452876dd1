"""No argument of `load` is passed over: each is honoured, or refused by what can be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import jackfield
from jackfield.api import LoadArguments, PlanArguments
from jackfield.demo import MODEL_PATH
from jackfield.errors import JackfieldError, UsageError
from jackfield.planning.spec import LoadSpec, PlanSpec
from jackfield.requests.arguments import OF_A_PLAN, OF_LOADING

ARGUMENTS = set(PlanArguments.__annotations__) | set(LoadArguments.__annotations__)
HONOURED = "is honoured, which tests of its own hold"

#: argument -> a value, and what is refused of it, for a live model and for one that is read; or
#: what is found in the plan
GIVEN: Mapping[str, tuple[Any, str, str]] = {
    "revision": ("main", "have none; drop it", "have none; drop it"),
    "dtype": ("bfloat16", "used as it is", "bfloat16 on cpu"),
    "device_map": ("balanced", "used where it is", HONOURED),
    "max_memory": ({"cpu": "1B"}, "used where it is", "max_memory gives cpu 1 byte"),
    "offload_folder": ("/nowhere", "used where it is", HONOURED),
    "adapter": ("/nowhere", "used as it is", "nowhere"),
    "adapters": ({"a": "/nowhere"}, "nowhere", "nowhere"),
    "max_adapters": (0, "max_adapters", "max_adapters"),
    "merge_adapter": (True, "none is given", "none is given"),
    "assistant": ({"dtype": "float32"}, "^assistant is used by none", "^assistant is used by none"),
    "assistant_model": ("demo-draft", "no tokenizer to go from", HONOURED),
    "quantization": ("int4-cpu", "this model is loaded", HONOURED),
    "attn_implementation": ("eager", "eager .named", "eager .named"),
    "cache_implementation": ("dynamic", "dynamic .named", "dynamic .named"),
    "decoding": ("prompt_lookup", "prompt_lookup .named", "prompt_lookup .named"),
    "scheduler": ("fifo", "fifo .named", "fifo .named"),
    "compile": ("none", "none .named", "none .named"),
    "kernels": ("cpu-rms-norm", HONOURED, HONOURED),
    "deterministic": (True, HONOURED, HONOURED),
    "tp_plan": ("auto", "say how many with tp_size=N", "say how many with tp_size=N"),
    "expert_parallel": (True, "there is one; add tp_size=N", "there is one; add tp_size=N"),
    "tp_size": (0, "a number of processes from 1 on", "a number of processes from 1 on"),
    "locked": ("/nowhere", "there is no lock /nowhere", "there is no lock /nowhere"),
    "profile": ("/nowhere", "there is no profile /nowhere", "there is no profile /nowhere"),
    "tokenizer": ("/nowhere", "/nowhere is not a folder", "/nowhere is not a folder"),
    "max_batch_size": (0, "max_batch_size", "max_batch_size"),
    "max_batch_tokens": (0, "max_batch_tokens", "max_batch_tokens"),
    "prefill_chunk_size": (0, "prefill_chunk_size", "prefill_chunk_size"),
    "target_step_seconds": (0, "target_step_seconds", "target_step_seconds"),
    "max_waiting": (0, "max_waiting", "max_waiting"),
    "stall_after": (0, "stall_after", "stall_after"),
    "image_hosts": (["example.org"], "reads no images", "reads no images"),
    "verify": (-1, "verify must be", "verify must be"),
}


@pytest.fixture(scope="module")
def live() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()


@pytest.fixture(scope="module")
def folder(live: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    live.save_pretrained(path)
    return path


def outcome(act: Callable[..., Any], model: Any, arguments: Mapping[str, Any]) -> str:
    """What is refused, or the plan in words."""
    try:
        made = act(model, **arguments)
    except JackfieldError as error:
        return str(error)
    with made:
        return str(made.explain())


def test_every_argument_is_walked() -> None:
    assert set(GIVEN) == ARGUMENTS


def test_what_is_handed_on_has_every_argument() -> None:
    assert {f.name for f in fields(PlanSpec)} - {"device_memory"} == OF_A_PLAN
    assert {f.name for f in fields(LoadSpec)} - {"device_memory"} == OF_LOADING == ARGUMENTS


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.one_in(4)
def test_an_argument_is_honoured_or_refused(name: str, live: PreTrainedModel, folder: Path) -> None:
    value, of_live, of_read = GIVEN[name]
    for model, says in ((live, of_live), (folder, of_read), ("demo", of_read)):
        if says is not HONOURED:
            with pytest.raises(AssertionError, match=says):
                raise AssertionError(outcome(jackfield.load, model, {name: value}))


def test_only_a_model_of_the_hub_has_revisions(live: PreTrainedModel, folder: Path) -> None:
    for model in ("demo", "demo-draft", folder, str(folder), live, live.config):
        with pytest.raises(UsageError, match="revision='nope': only models of the hub"):
            jackfield.plan(model, revision="nope")
    with pytest.raises(UsageError, match="assistant_model: revision='nope'"):
        jackfield.plan("demo", assistant_model="demo-draft", assistant={"revision": "nope"})
    for wrong in (3, ""):
        with pytest.raises(UsageError, match="revision must be"):
            jackfield.plan("org/model", revision=wrong)  # type: ignore[arg-type]


def test_a_bound_for_a_device_that_gets_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="names disk, and device_map='cpu' puts nothing there"):
        jackfield.plan("demo", device_map="cpu", max_memory={"cpu": "4GB", "disk": "4GB"})


@pytest.mark.parametrize(
    "given",
    [
        {"torch_dtype": torch.bfloat16, "dtype": torch.float32},
        {"dtype": "float32", "torch_dtype": "bfloat16"},
        {"device": "cpu", "device_map": "auto"},
        {"device_map": "auto", "device": "cpu"},
        {"load_in_4bit": True, "quantization": "int4-cpu"},
        {"load_in_4bit": True, "load_in_8bit": True},
        {"batch_size": 3, "max_batch_size": 4},
        {"disable_compile": True, "compile": True},
    ],
)
def test_two_values_of_one_argument_are_told_as_they_were_written(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        jackfield.load("demo", **given)
    assert str(caught.value).startswith(" and ".join(f"{k}={v!r}" for k, v in given.items()))


@pytest.mark.parametrize("name", [MODEL_PATH, str(MODEL_PATH), "demo"])
def test_a_tokenizer_may_be_named(name: Any, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    with jackfield.load(model, tokenizer=name) as engine:
        assert engine.generate("Once upon", max_new_tokens=3)[0].text
    how = {"assistant_model": "demo-draft", "assistant": {"tokenizer": name}}
    with jackfield.load("demo", decoding="assisted", **how) as engine:
        assert engine.generate("Once upon", max_new_tokens=3)[0].text
    with pytest.raises(UsageError, match="is a folder without"):
        jackfield.load("demo", tokenizer=folder)


def test_what_is_no_tokenizer_is_refused_at_load(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    wrong = {
        "tokenizer_object": tokenizer.backend_tokenizer,
        "is a class": type(tokenizer),
        "decode tokens": tokenizer.decode,
        "a folder": 3,
    }
    for says, given in wrong.items():
        with pytest.raises(UsageError, match=says):
            jackfield.load("demo", tokenizer=given)
        with pytest.raises(UsageError, match=f"assistant_model: .*{says}"):
            jackfield.load("demo", assistant_model="demo-draft", assistant={"tokenizer": given})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtype": "half"}, "not 'half'; write 'float16'"),
        ({"dtype": "bf16"}, "not 'bf16'; write 'bfloat16'"),
        ({"quantization": "int8"}, "write 'int8-cpu', 'bnb-8bit' or 'torchao'"),
        ({"device_map": "mps:7"}, "not a device of this machine, which has .*cpu$"),
    ],
)
def test_other_names_are_told_with_ours(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        jackfield.plan("demo", **arguments)


def test_a_compiled_model_is_told_how_to_be_compiled(live: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="compile='inductor'"):
        jackfield.load(torch.compile(live))  # type: ignore[arg-type]


def test_an_estimate_says_how_to_plan_for_a_device_elsewhere() -> None:
    with pytest.raises(UsageError, match="give --device-memory 80GB"):
        jackfield.estimate("demo", device_map="cuda:99")
