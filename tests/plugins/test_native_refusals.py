"""Models whose Python asks for numbers of a step are refused in the plan, quietly and by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import zoo
from families import FAMILIES
from transformers import LlamaConfig

import jackfield
from jackfield.errors import PlanError
from jackfield.planning.solving import reasons_against
from jackfield.registry.discovery import registry
from jackfield.spelling import parse
from jackfield_plugins.native import NativeKernel

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def config(kind: str) -> Any:
    if kind == "dynamic":
        return LlamaConfig(**{**FAMILIES["llama"].arguments, "rope_parameters": DYNAMIC})
    return zoo.config_of(kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dynamic", "the rotary embedding follows the longest text"),
        ("longcat_flash", "some experts compute nothing"),
        ("jetmoe", "needs shapes that are known"),
        ("xmod", "needs shapes that are known"),
    ],
)
def test_what_asks_for_numbers_is_refused(
    kind: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlanError, match=reason):
        jackfield.plan(config(kind), compile="native", dtype="float32")
    assert capfd.readouterr() == ("", "")
    assert jackfield.plan(config(kind), dtype="float32")["compiler"].registered.name == "none"


def test_a_rope_that_goes_with_lengths_is_refused_by_every_compiler() -> None:
    with pytest.raises(PlanError, match="numbers of a step decide"):
        jackfield.plan(config("dynamic"), compile="inductor", dtype="float32")
    longrope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    arguments = {**FAMILIES["llama"].arguments, "rope_parameters": longrope}
    chosen = jackfield.plan(LlamaConfig(**arguments), compile="native", dtype="float32")
    assert chosen["compiler"].registered.name == "native"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("compiler", "native"), ("kernel", "cpu-rms-norm"), ("attention", "cpu_decode")],
)
def test_a_job_of_another_machine_needs_no_c_compiler_on_this_one(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device is what speaks against kernels for this processor."""
    monkeypatch.setattr(NativeKernel, "cannot_build", lambda _: ["no C++ compiler here"])
    one = registry().find(kind, parse(name))
    here = jackfield.plan(config("llama"), dtype="float32").requirements
    there = replace(here, device="cuda", elsewhere=True)
    assert "no C++ compiler here" in reasons_against(one, here, one.backend.options())
    (reason,) = reasons_against(one, there, one.backend.options())
    assert "cuda" in reason
