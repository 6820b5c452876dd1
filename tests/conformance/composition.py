"""The composition table: every attention with every cache on every family, run and written down.

    python tests/conformance/composition.py            # runs all of it, writes docs/composition.md

A cell is one attention with one cache on one family. It is refused by a plan, with the reason, or
it gives the oracle's tokens in every mode: single prompts, a ragged (left-padded) batch whose
lengths run from window - 2 to 3 × window, and prefill in chunks of 1, of 7 and of everything.
Anything else is a third outcome, and there must be none.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from families import FAMILIES, MORE_FAMILIES, WINDOW, build, oracle, prompts

import jackfield
from jackfield.discovery import registry
from jackfield.errors import JackfieldError, UsageError

if TYPE_CHECKING:
    import transformers

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
ALL = (*FAMILIES, *MORE_FAMILIES)
LENGTHS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
COUNT = 2 * WINDOW + 2
CHUNKS = (1, 7, None)
#: Options that a backend cannot do without, or that a test of tiny models needs.
SPELLED = {"paged": "paged?page_size=4", "hub": "hub?repo=nobody/nothing&revision=0"}
LOSSY = {"quantized": "stores keys and values in fewer bits: compared with a round trip instead"}
SLOW = {"triton": "runs here in Triton's interpreter: compared kernel by kernel instead"}


class Cell(NamedTuple):
    """What became of one combination: "equal", "refused" or "wrong", and why."""

    family: str
    attention: str
    cache: str
    outcome: str
    note: str


@functools.cache
def model_of(family: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return build(family, dtype)


@functools.cache
def expected(family: str, dtype: torch.dtype) -> list[list[int]]:
    model = build(family, dtype)
    return [oracle(model, prompt, COUNT) for prompt in prompts(LENGTHS)]


def names(kind: str) -> list[str]:
    return sorted({r.name for r in registry().of_kind(kind)})


def run(family: str, attention: str, cache: str) -> Cell:
    """One cell, in float64, or in float32 where only the dtype stands in the way of float64."""
    chosen = {
        "attn_implementation": SPELLED.get(attention, attention),
        "cache_implementation": SPELLED.get(cache, cache),
    }
    for dtype in (torch.float64, torch.float32):
        try:
            plan = jackfield.plan(model_of(family, dtype), **chosen)
        except JackfieldError as refused:
            reason = str(refused)
            if "dtype float64" in reason and dtype == torch.float64:
                continue
            return Cell(family, attention, cache, "refused", reason)
        assert (plan["attention"].registered.name, plan["cache"].registered.name) == (
            attention,
            cache,
        )
        wrong = [mode for mode, same in modes(family, dtype, chosen) if not same]
        note = f"not equal: {', '.join(wrong)}" if wrong else str(dtype).removeprefix("torch.")
        return Cell(family, attention, cache, "wrong" if wrong else "equal", note)
    raise AssertionError("a dtype was refused twice")


def modes(family: str, dtype: torch.dtype, chosen: dict[str, str]) -> Iterable[tuple[str, bool]]:
    model, wanted = model_of(family, dtype), expected(family, dtype)
    whole = jackfield.plan(model).requirements.whole_prompt
    for chunk in CHUNKS:
        if whole and chunk is not None:
            with pytest.raises(UsageError, match="one piece"):
                jackfield.load(model, prefill_chunk_size=chunk, **chosen)
            continue
        with jackfield.load(model, prefill_chunk_size=chunk, **chosen) as engine:
            found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
            yield f"ragged, chunks of {chunk or 'all'}", [c.token_ids for c in found] == wanted
            if chunk is None:
                alone = [engine.generate(p, max_new_tokens=COUNT)[0] for p in prompts(LENGTHS)]
                yield "single", [c.token_ids for c in alone] == wanted


def cells(families: Iterable[str] = ALL) -> list[Cell]:
    pairs = [
        (attention, cache)
        for attention in names("attention")
        for cache in names("cache")
        if attention not in SLOW and cache not in LOSSY
    ]
    return [run(family, *pair) for family in families for pair in pairs]


def page(found: list[Cell]) -> str:
    """The documentation page: counts, then every refusal of the runs by its reason."""
    grid: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for cell in found:
        kind = cell.note if cell.outcome == "equal" else cell.outcome
        grid[cell.attention, cell.cache][kind] += 1
    caches = sorted({cell.cache for cell in found})
    lines = [
        "# What goes with what",
        "",
        f"Written by `python tests/conformance/composition.py` on a CPU: {len(ALL)} families ×",
        "every attention × every cache. *Equal*: the same tokens as `transformers.generate` with",
        "eager attention, one sequence at a time, for single prompts, a ragged left-padded batch",
        "with lengths from window − 2 to 3 × window, and prefill in chunks of 1, 7 and all tokens;",
        "in float64, or in float32 (\\*) where the attention takes no float64. *Refused*: by name,",
        "with a reason, before weights load. There is no third outcome. Models with",
        "linear-attention layers and prefix models read a prompt in one piece; chunks are refused",
        "there.",
        "",
        "| attention | " + " | ".join(f"`{c}`" for c in caches) + " |",
        "|---" * (len(caches) + 1) + "|",
    ]
    for attention in sorted({cell.attention for cell in found}):
        row = [_cell(grid[attention, cache]) for cache in caches]
        lines.append(f"| `{attention}` | " + " | ".join(row) + " |")
    lines += ["", *_left_out(), "", "## Families", "", _families(found), "", "## Why refused", ""]
    return "\n".join([*lines, *_refusals(found)]) + "\n"


def _cell(counts: Counter[str]) -> str:
    parts = [
        f"{counts[key]}{mark} {word}"
        for key, mark, word in (
            ("float64", "", "equal"),
            ("float32", "\\*", "equal"),
            ("refused", "", "refused"),
            ("wrong", "", "WRONG"),
        )
        if counts[key]
    ]
    return ", ".join(parts)


def _left_out() -> list[str]:
    return [f"Not in the table: `{name}` ({why})." for name, why in {**LOSSY, **SLOW}.items()]


def _families(found: list[Cell]) -> str:
    rows = [
        f"`{family}` ({sum(c.outcome == 'equal' for c in found if c.family == family)} equal)"
        for family in dict.fromkeys(cell.family for cell in found)
    ]
    return " · ".join(rows)


def _refusals(found: list[Cell]) -> list[str]:
    """One line per reason, with what it stands against."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for cell in found:
        if cell.outcome == "refused":
            reason = cell.note.split(": ", 1)[-1].rsplit("; ", 1)[0]
            reasons[reason].append(cell.family)
    return [
        f"- {reason}: {', '.join(f'`{f}`' for f in dict.fromkeys(families))}"
        for reason, families in sorted(reasons.items())
    ]


if __name__ == "__main__":
    table = cells()
    PAGE.write_text(page(table))
    third = [cell for cell in table if cell.outcome == "wrong"]
    raise SystemExit("\n".join(map(str, third)) if third else 0)
