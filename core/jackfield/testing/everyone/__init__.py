"""What every backend must do, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.contracts import Backend
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.everyone import answers, importing, running
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """What does not depend on the kind."""

    def available(_: object) -> None:
        reasons = subject.registered.ask("available")
        if not isinstance(reasons, list | tuple) or not all(isinstance(r, str) for r in reasons):
            raise WrongError(f"available must return a list of reasons, not {reasons!r}")
        if reasons:
            raise NotTriedError(f"it cannot run on this machine: {'; '.join(reasons)}")

    def own_class(_: object) -> None:
        if not isinstance(subject.backend, Backend):
            raise WrongError(f"is not a Backend but {type(subject.backend).__name__}")

    yield Check("everyone.available", "contract", available)
    yield Check("everyone.class", "contract", own_class)
    yield from importing.checks(subject)
    yield from answers.checks(subject)


def last(subject: Subject) -> Iterator[Check]:
    """Those that take engines, once it has been shown that these are right."""
    yield from running.checks(subject)
