"""What the composition tables are made of: one combination on one family, and what became of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from families import FAMILIES, MORE_FAMILIES, build

import jackfield
from jackfield.errors import JackfieldError
from jackfield.planning.solving import ARGUMENTS
from jackfield.registry.discovery import registry

if TYPE_CHECKING:
    import transformers

ALL = (*FAMILIES, *MORE_FAMILIES)
#: Options that a backend cannot do without, or that a test of tiny models needs.
SPELLED = {
    "paged": "paged?page_size=4",
    "quantized": "quantized?backend=fp8",
    "hub": "hub?repo=nobody/nothing&revision=0",
    "inductor": "inductor?backend=eager",
    "bnb-8bit": "bnb-8bit?threshold=0",
}
#: What no table has, and why.
LOSSY = {"quantized": "stores keys and values in fewer bits: compared with a round trip instead"}
SLOW = {
    "gptq": "calibrates for half a minute: compared on the demo model instead",
    "triton": "runs here in Triton's interpreter: compared kernel by kernel instead",
}

#: A mode of running, and whether its tokens were those of the oracle.
Mode = tuple[str, bool]


class Cell(NamedTuple):
    """What became of one combination: "equal", "refused" or "wrong", and why."""

    family: str
    row: str
    cache: str
    outcome: str
    note: str


def names(kind: str) -> list[str]:
    return sorted({r.name for r in registry().of_kind(kind)})


@functools.cache
def model_of(family: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """For engines; an oracle has a model of its own."""
    return build(family, dtype)


def with_cache(
    kind: str, name: str, cache: str, model: Callable[[torch.dtype], transformers.PreTrainedModel]
) -> tuple[dict[str, str], Callable[[torch.dtype], object]]:
    """The arguments that choose a backend of `kind` and a cache, and what plans with them."""
    chosen = {
        ARGUMENTS[kind]: SPELLED.get(name, name),
        "cache_implementation": SPELLED.get(cache, cache),
    }

    def plan(dtype: torch.dtype) -> None:
        found = jackfield.plan(model(dtype), **chosen)
        assert found[kind].registered.name == name
        assert found["cache"].registered.name == cache

    return chosen, plan


def judge(
    family: str,
    row: str,
    cache: str,
    plan: Callable[[torch.dtype], object],
    modes: Callable[[torch.dtype], Iterable[Mode]],
) -> Cell:
    """One cell, in float64, or in float32 where only the dtype stands in the way of float64.

    `plan` raises what refuses it; `modes` runs it.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            plan(dtype)
        except JackfieldError as refused:
            reason = str(refused)
            if "float64" in reason and dtype == torch.float64:
                continue
            return Cell(family, row, cache, "refused", reason)
        try:
            wrong = [mode for mode, same in modes(dtype) if not same]
        except JackfieldError as failed:  # what was not refused must run
            wrong = [str(failed)]
        note = f"not equal: {', '.join(wrong)}" if wrong else str(dtype).removeprefix("torch.")
        return Cell(family, row, cache, "wrong" if wrong else "equal", note)
    raise AssertionError("a dtype was refused twice")
