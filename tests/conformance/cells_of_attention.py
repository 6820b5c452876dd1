"""Every attention with every cache on every family.

A cell is refused by a plan, with the reason, or it gives the tokens of plain `generate` in every
mode: single prompts, a ragged (left-padded) batch whose lengths run from window - 2 to 3 × window,
and prefill in chunks of 1, of 7 and of everything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest
from cells import LOSSY, SLOW, Cell, Mode, judge, model_of, names, with_cache
from families import WINDOW, build, oracle, prompts

import jackfield
from jackfield.errors import UsageError

if TYPE_CHECKING:
    import torch

LENGTHS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
COUNT = 2 * WINDOW + 2
CHUNKS = (1, 7, None)


@functools.cache
def expected(family: str, dtype: torch.dtype) -> list[list[int]]:
    model = build(family, dtype)
    return [oracle(model, prompt, COUNT) for prompt in prompts(LENGTHS)]


def pairs() -> list[tuple[str, str]]:
    """The attentions and caches that are tried with each other."""
    return [
        (attention, cache)
        for attention in names("attention")
        for cache in names("cache")
        if attention not in SLOW and cache not in LOSSY
    ]


def cells(family: str) -> list[Cell]:
    return [run(family, *pair) for pair in pairs()]


def run(family: str, attention: str, cache: str) -> Cell:
    chosen, plan = with_cache("attention", attention, cache, lambda dtype: model_of(family, dtype))
    return judge(family, attention, cache, plan, lambda dtype: modes(family, dtype, chosen))


def modes(family: str, dtype: torch.dtype, chosen: dict[str, str]) -> Iterable[Mode]:
    model, wanted = model_of(family, dtype), expected(family, dtype)
    whole = jackfield.plan(model, **chosen).requirements.whole_prompt
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
