"""Checks of compilers: a step by itself, and whole engines against logits computed again."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.testing.checks import Check
from jackfield.testing.compiler import engines, refusals, steps, threads, varied
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """All of them; one that leaves steps as they are has none to compile."""
    if subject.backend.compiles:
        yield from steps.checks(subject)
        yield from varied.checks(subject)
        yield from threads.checks(subject)
    yield from engines.checks(subject)
    if subject.backend.compiles:
        yield from refusals.checks(subject)
