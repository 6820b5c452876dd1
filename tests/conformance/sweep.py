"""Every causal type of transformers, tiny, with every cache and every attention of a CPU.

    python tests/conformance/sweep.py             # all of it; writes docs/families.md
    python tests/conformance/sweep.py llama doge  # these types, shown and not written

A cell is a ragged batch (lengths 1, 3, 7 and 12; windows of 5 and sparse attention of 4) whose
prompts are read whole, with eager attention and under `auto` also in chunks of 7, under `auto` also
of 1 and each prompt by itself. It is refused by a plan, with the reason, or it gives the tokens of
plain `generate` with eager attention, one prompt at a time, in float64 (float32 where a model's own
code takes no float64). Every row that is done is kept in a file, so that a run that was cut goes on
where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import logging
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from cells import SPELLED, names
from families import prompts

import jackfield
from jackfield.errors import JackfieldError

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
KEPT = Path(tempfile.gettempdir()) / "jackfield-sweep.jsonl"
LENGTHS = (1, 3, 7, 12)
COUNT = 8
WHOLE = (None,)
CHUNKS = {"auto": (None, 7, 1), "eager": (None, 7)}
CACHES = ("dynamic", "static", "paged")
ATTENTIONS = ("eager", "sdpa", "cpu_decode", "flex_attention")
AUTO = "auto"

Row = dict[str, Any]


def cells() -> list[tuple[str, str]]:
    """(cache, attention): every pair that a CPU has, and what `auto` takes."""
    attentions = [name for name in ATTENTIONS if name in names("attention")]
    return [(AUTO, AUTO), *((cache, one) for cache in CACHES for one in attentions)]


def of_type(model_type: str) -> Row:
    """What became of each cell of a type: "equal", "refused: why" or "WRONG: why"."""
    began = time.process_time()
    found: Row = {"type": model_type, "cells": {}}
    try:
        model, wanted = _reference(model_type)
    except Exception as error:  # noqa: BLE001 - any model's code
        return {**found, "unbuilt": _line(error)}
    found["dtype"] = str(model.dtype).removeprefix("torch.")
    found["uncached"] = wanted == [_uncached(model, prompt) for prompt in prompts(LENGTHS)]
    for cache, attention in cells():
        found["cells"][f"{cache}, {attention}"] = cell(model, wanted, cache, attention)
    found["seconds"] = round(time.process_time() - began, 1)
    return found


@functools.lru_cache(maxsize=1)
def _reference(model_type: str) -> tuple[transformers.PreTrainedModel, list[list[int]]]:
    """A model and what plain transformers says with it, in the first dtype that it runs in."""
    for dtype in (torch.float64, torch.float32):
        model = zoo.build(model_type, dtype)
        with contextlib.suppress(RuntimeError):
            return model, [_plain(model, prompt) for prompt in prompts(LENGTHS)]
    raise ValueError("it does not generate in plain transformers")


def cell(
    model: transformers.PreTrainedModel, wanted: list[list[int]], cache: str, attention: str
) -> str:
    chosen = {
        "cache_implementation": SPELLED.get(cache, cache),
        "attn_implementation": attention,
    }
    try:
        plan = jackfield.plan(model, **chosen)
    except JackfieldError as refused:
        return f"refused: {_line(refused)}"
    chunks = CHUNKS.get(attention, WHOLE)
    if plan.requirements.whole_prompt is not None:
        chunks = WHOLE
    wrong = [
        what for chunk in chunks for what in _wrong(model, wanted, chunk, chosen, attention == AUTO)
    ]
    return f"WRONG: {'; '.join(wrong)}" if wrong else "equal"


def _wrong(
    model: transformers.PreTrainedModel,
    wanted: list[list[int]],
    chunk: int | None,
    chosen: dict[str, str],
    alone: bool,
) -> Iterable[str]:
    try:
        with jackfield.load(model, prefill_chunk_size=chunk, **chosen) as engine:
            found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
            if [c.token_ids for c in found] != wanted:
                yield f"a ragged batch in chunks of {chunk or 'all'}"
            if alone:
                one = [engine.generate(p, max_new_tokens=COUNT)[0] for p in prompts(LENGTHS)]
                if [c.token_ids for c in one] != wanted:
                    yield f"single prompts in chunks of {chunk or 'all'}"
    except Exception as error:  # noqa: BLE001 - what was planned must run
        yield f"{type(error).__name__}: {_line(error)}"


def _plain(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    more = {"token_type_ids": torch.ones_like(ids)} if _has_prefix(model) else {}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, **more
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def _uncached(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The same without any cache: all of it is read again for each token."""
    taken = inspect.signature(model.forward).parameters
    tokens = list(prompt)
    for _ in range(COUNT):
        ids = torch.tensor([tokens])
        more = {"attention_mask": torch.ones_like(ids), "use_cache": False}
        if "position_ids" in taken:
            more["position_ids"] = torch.arange(len(tokens))[None]
        if _has_prefix(model):
            more["token_type_ids"] = (torch.arange(len(tokens)) < len(prompt)).long()[None]
        given = {name: value for name, value in more.items() if name in taken}
        tokens.append(int(model(input_ids=ids, **given).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _has_prefix(model: transformers.PreTrainedModel) -> bool:
    return bool(getattr(model.config, "prefix_lm", False))


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]


def run(types: Iterable[str], kept: Path | None) -> list[Row]:
    """A row a type, those in `kept` as they were."""
    done = {}
    if kept is not None and kept.exists():
        done = {row["type"]: row for row in map(json.loads, kept.read_text().splitlines())}
    rows = []
    for model_type in types:
        row = done.get(model_type) or of_type(model_type)
        rows.append(row)
        if kept is not None and model_type not in done:
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def wrong(rows: Iterable[Row]) -> list[str]:
    return [
        f"{row['type']}, {name}: {outcome}"
        for row in rows
        for name, outcome in row["cells"].items()
        if outcome.startswith("WRONG")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    given = parser.parse_args().types
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    rows = run(given or zoo.TYPES, None if given else KEPT)
    if given:
        raise SystemExit(json.dumps(rows, indent=1))
    from sweep_page import page

    PAGE.write_text(page(rows, zoo.TYPES))
    KEPT.unlink()
    if third := wrong(rows):
        raise SystemExit("\n".join(third))


if __name__ == "__main__":
    main()
