"""Every causal type of transformers, tiny, shared by two processes.

    python tests/conformance/shared_sweep.py             # all types
    python tests/conformance/shared_sweep.py llama glm   # these
    python tests/conformance/shared_sweep.py --expert-parallel  # with experts as a whole

A type is refused by a plan, or before its weights are read, with the reason; or what two processes
say is what one process says, with each of the caches below, in float64 where it takes that.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import zoo
from families import prompts
from two_ranks import Load, two_ranks

import jackfield
from jackfield.errors import JackfieldError, PlanError

LENGTHS = (1, 3, 7, 12)
COUNT = 8
CACHES = ("auto", "dynamic")


def run(types: Iterable[str], **more: Any) -> Iterator[tuple[str, str]]:
    """(type, outcome): "equal", "refused: why", "WRONG: why"; without types that do not run."""
    with two_ranks() as load, tempfile.TemporaryDirectory() as folder:
        for model_type in types:
            path = Path(folder) / model_type
            if _saved(model_type, path):
                yield model_type, _outcome(load, path, more)


def _saved(model_type: str, path: Path) -> bool:
    """Whether there is a small model of a type that one process runs."""
    for dtype in (torch.float64, torch.float32):
        try:
            zoo.build(model_type, dtype).save_pretrained(path)
            _said(jackfield.load(path))
        except Exception:  # noqa: BLE001 - any model's code; the other sweep tells of it
            continue
        return True
    return False


def _outcome(load: Load, path: Path, more: dict[str, Any]) -> str:
    try:
        jackfield.plan(path, tp_size=2, **more)
    except JackfieldError as refused:
        return f"refused: {refused}"
    for cache in CACHES:
        wanted = _said(jackfield.load(path, cache_implementation=cache))
        try:
            with load(path, cache_implementation=cache, **more) as engine:
                found = _said(engine)
        except PlanError as refused:
            return f"refused: {refused}"
        except Exception as error:  # noqa: BLE001 - what was planned must run
            return f"WRONG: {cache}: {type(error).__name__}: {error}"
        if found != wanted:
            return f"WRONG: {cache}: other tokens"
    return "equal"


def _said(engine: jackfield.Engine) -> list[list[int]]:
    with engine:
        return [one.token_ids for one in engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)]


if __name__ == "__main__":
    types, experts = sys.argv[1:], "--expert-parallel"
    more = {"expert_parallel": True} if experts in types else {}
    for row in run([one for one in types if one != experts] or zoo.TYPES, **more):
        sys.stdout.write(f"{': '.join(row)}\n")
        sys.stdout.flush()
