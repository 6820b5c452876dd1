"""Checks of schedulers: called directly, in simulated traffic, and in an engine."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.testing.checks import Check
from jackfield.testing.scheduler import bounds, served, waiting
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """The basic ones first."""
    yield from bounds.checks(subject)
    yield from waiting.checks(subject)
    yield from served.checks(subject)
