"""Checks of decodings: strategies that draft, searches, and plain ones."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.testing.checks import Check
from jackfield.testing.decoding import beams, declared, drafts, draws, searched, texts
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """By what it declares, the basic ones first."""
    own = subject.backend.capabilities
    if own.forks:
        yield from beams.checks(subject)
        if "do_sample" in own.settings:
            yield from draws.checks(subject)
    elif own.rollback:
        yield from drafts.checks(subject)
    if own.heads:  # which no model of the kit has
        yield from declared.of_heads(subject)
        return
    yield from declared.checks(subject)
    yield from searched.checks(subject) if own.forks else texts.checks(subject)
