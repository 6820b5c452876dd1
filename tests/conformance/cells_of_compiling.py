"""Every compiler with every cache on every family.

A cell is refused by a plan, with the reason, or it gives the tokens of plain `generate`: single
prompts, a ragged batch, and a ragged batch with drafts where the cache can take them back. The
compiler must have been called.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from cells import LOSSY, Cell, Mode, judge, names, with_cache
from cells_of_attention import COUNT, LENGTHS, expected
from drafting import LOOKUP
from families import build, prompts

import jackfield
from jackfield.errors import PlanError

if TYPE_CHECKING:
    import transformers


@functools.cache
def model_of(family: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """With experts as compiled steps need them, where the dtype has them."""
    model = build(family, dtype)
    if dtype != torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    return model


def cells(family: str) -> list[Cell]:
    return [
        run(family, compiler, cache)
        for compiler in names("compiler")
        for cache in names("cache")
        if cache not in LOSSY
    ]


def run(family: str, compiler: str, cache: str) -> Cell:
    chosen, plan = with_cache("compiler", compiler, cache, lambda dtype: model_of(family, dtype))
    return judge(family, compiler, cache, plan, lambda dtype: modes(family, dtype, chosen))


def modes(family: str, dtype: torch.dtype, chosen: dict[str, str]) -> Iterable[Mode]:
    model, wanted = model_of(family, dtype), expected(family, dtype)
    try:
        jackfield.plan(model, decoding=LOOKUP, **chosen)
        offered = {"sample": "sample", "lookup": LOOKUP}
    except PlanError:
        offered = {"sample": "sample"}
    with jackfield.load(model, decoding=offered, **chosen) as engine:
        for name in offered:
            found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT, decoding=name)
            yield f"ragged, {name}", [c.token_ids for c in found] == wanted
        alone = [engine.generate(p, max_new_tokens=COUNT)[0] for p in prompts(LENGTHS)]
        yield "single", [c.token_ids for c in alone] == wanted
        yield "compiled", engine.report()["compiler"].calls > 0 or chosen["compile"] == "none"
