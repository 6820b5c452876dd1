"""Checks in an engine: whoever goes first, texts are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jackfield.testing.checks import Check, WrongError
from jackfield.testing.decoding.plain import exact
from jackfield.testing.engines import engine_with
from jackfield.testing.models import Reference
from jackfield.testing.subject import Subject

PROMPTS = ([5], [9, 8, 7, 6, 5], list(range(30)), [3, 2], list(range(40, 60)), [7] * 9)
COUNT = 6
#: What an engine is loaded with.
ENGINES: dict[str, dict[str, Any]] = {
    "padded": {"cache_implementation": "dynamic"},
    "packed": {"cache_implementation": "paged"},
    "fewer places than requests": {"cache_implementation": "paged", "max_batch_size": 2},
    "padded, fewer places": {"cache_implementation": "dynamic", "max_batch_size": 2},
    "max_batch_tokens=7": {
        "cache_implementation": "paged", "max_batch_size": 4, "max_batch_tokens": 7,
    },
    "prefill_chunk_size=3": {"cache_implementation": "paged", "prefill_chunk_size": 3},
    "preemptions": {"cache_implementation": "paged?page_size=4&num_tokens=64"},
    "preemptions, max_batch_tokens=7": {
        "cache_implementation": "paged?page_size=4&num_tokens=64", "max_batch_size": 4,
        "max_batch_tokens": 7,
    },
    "deterministic=True": {"deterministic": True, "prefill_chunk_size": 4, "max_batch_size": 3},
    "beams": {"cache_implementation": "paged", "decoding": "beam", "max_batch_size": 8},
}  # fmt: skip


def checks(subject: Subject) -> Iterator[Check]:
    """Logits against a recomputation of each request alone."""
    yield Check("engine.logits", "contract", lambda case: _logits(subject, case), tuple(ENGINES))


def _logits(subject: Subject, case: str) -> str:
    model = exact(subject.seed)
    reference = Reference(model)
    asked = [{"priority": n % 2} for n in range(len(PROMPTS))]
    with engine_with(subject, model, **ENGINES[case]) as (engine, computed):
        found = engine.generate([*PROMPTS], settings=asked, max_new_tokens=COUNT)
    for number, one in enumerate(found):
        if one.error is not None or len(one.token_ids) != COUNT:
            raise WrongError(
                f"request {number} ended with {len(one.token_ids)} tokens: {one.error}"
            )
    return computed.compare(reference)
