"""Which checks there are for a backend of each kind."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from jackfield.errors import PluginError
from jackfield.planning.solving import reasons_of
from jackfield.testing import everyone
from jackfield.testing.checks import Check, NotTriedError
from jackfield.testing.subject import Subject


def checks_of(subject: Subject) -> list[Check]:
    """All checks of `subject`, in the order in which they run: what is cheap and basic first."""
    found = list(_all(subject))
    names = [check.name for check in found]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"two checks of one name: {', '.join(sorted(twice))}"
    return found


def _all(subject: Subject) -> Iterator[Check]:
    if flaws := subject.backend.flaws():
        raise PluginError(f"{subject.registered} cannot be checked: {'; '.join(flaws)}")
    yield from everyone.checks(subject)
    missing = _not_here(subject)
    of_its_kind = importlib.import_module(f"jackfield.testing.{subject.kind}").checks(subject)
    for check in itertools.chain(of_its_kind, everyone.last(subject)):
        yield check if missing is None else replace(check, run=partial(_told, missing), cases=("",))


def _not_here(subject: Subject) -> str | None:
    """Why nothing of the kind can be tried on this machine; None: it can."""
    if reasons := reasons_of(subject.registered, "available"):
        return f"it cannot run on this machine: {'; '.join(reasons)}"
    devices = getattr(getattr(subject.backend, "capabilities", None), "devices", None)
    if devices is not None and subject.device not in devices:
        return f"it runs on {', '.join(sorted(devices))}, and the checks on {subject.device}"
    return None


def _told(reason: str, _: object) -> None:
    raise NotTriedError(reason)
