"""Which checks there are for a backend of each kind."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from jackfield.errors import PluginError
from jackfield.testing.checks import Check
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
    for room in ("everyone", subject.kind):
        yield from importlib.import_module(f"jackfield.testing.{room}").checks(subject)
