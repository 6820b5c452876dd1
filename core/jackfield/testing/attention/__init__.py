"""Checks of attentions: direct calls with numbers of the kit's own, and whole engines."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.testing.attention import (
    crossing,
    packed,
    packed_steps,
    padded,
    recording,
    refusals,
    whole,
)
from jackfield.testing.attention.jobs import Jobs, capabilities_of
from jackfield.testing.checks import Check
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """One for each capability and situation."""
    jobs, can = Jobs(subject), capabilities_of(subject)
    if "padded" in can.layouts:
        yield from padded.checks(subject, jobs)
    if "packed" in can.layouts:
        yield from packed.checks(subject, jobs)
        yield from packed_steps.checks(subject, jobs)
        yield from recording.checks(subject, jobs)
    yield from whole.checks(subject)
    yield from crossing.checks(subject)
    yield from refusals.checks(subject)
