"""Which checks there are for a backend of each kind."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from jackfield.errors import PluginError
from jackfield.planning.solving import reasons_of
from jackfield.testing import everyone
from jackfield.testing.checks import Check, NotTriedError
from jackfield.testing.subject import Subject

_SLOW = "Triton's interpreter would take minutes; on a GPU it is tried"


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
        if missing is not None:
            yield replace(check, run=partial(_told, missing), cases=("",))
        else:
            yield replace(check, run=partial(_compiled, check.run)) if check.large else check


def _not_here(subject: Subject) -> str | None:
    """Why nothing of the kind can be tried on this machine; None: it can."""
    if reasons := reasons_of(subject.registered, "available"):
        return f"it cannot run on this machine: {'; '.join(reasons)}"
    devices = getattr(getattr(subject.backend, "capabilities", None), "devices", None)
    if devices is not None and subject.device not in devices:
        return f"it runs on {', '.join(sorted(devices))}, and the checks on {subject.device}"
    return None


def _compiled(run: Callable[[Any], str | None], case: Any) -> str | None:
    """Run a large case, unless it has Triton's interpreter run a kernel."""
    with _nothing_interpreted() as asked:
        try:
            remark = run(case)
        except Exception:  # an engine says in its own words that a kernel failed
            if not asked:
                raise
    if asked:
        raise NotTriedError(_SLOW)
    return remark


@contextlib.contextmanager
def _nothing_interpreted() -> Iterator[list[str]]:
    """Triton's interpreter fails at every kernel meanwhile; the list gets their names."""
    asked: list[str] = []
    if not os.environ.get("TRITON_INTERPRET") or importlib.util.find_spec("triton") is None:
        yield asked
        return
    grids = importlib.import_module("triton.runtime.interpreter").GridExecutor
    own = grids.__call__

    def fail(grid: Any, *_: Any, **__: Any) -> None:
        asked.append(grid.fn.__name__)
        raise NotTriedError(_SLOW)

    grids.__call__ = fail  # of the class: threads launch kernels too
    try:
        yield asked
    finally:
        grids.__call__ = own


def _told(reason: str, _: object) -> None:
    raise NotTriedError(reason)
