"""Checks of decodings: strategies that draft, searches, and plain ones."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.testing.checks import Check
from jackfield.testing.decoding import declared, drafts, texts
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """By what it declares, the basic ones first."""
    own = subject.backend.capabilities
    if own.rollback and not own.forks:
        yield from drafts.checks(subject)
    yield from declared.checks(subject)
    if not own.forks:
        yield from texts.checks(subject)
