"""A wrong backend of the zoo, and whether the kit catches it.

    python tests/zoo/caught.py            # the share that is caught, for each kind

A kind's file is `tests/zoo/<kind>.py` and has a tuple `ZOO` of these.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.contracts import Backend
from jackfield.testing.checks import Check, Verdict, failures, not_there, verdict
from jackfield.testing.subject import uninstalled
from jackfield.testing.suites import checks_of

#: What torch says of gradients in a fork of a process that has threads for them; whether it has
#: depends on the tests before. Such a check is made here, in this process.
_IN_A_FORK = "fork-based multiprocessing"


@dataclass(frozen=True)
class Wrong:
    """A backend that is wrong in one way.

    Attributes:
        name: Its fault in a few words, unique in a kind.
        backend: Makes it.
        words: A regular expression, for a verdict that names the fault.
    """

    name: str
    backend: Callable[[], Backend]
    words: str

    def __str__(self) -> str:
        return self.name


def caught(wrong: Wrong, limit: float = 1.0) -> Verdict | None:
    """The first failed verdict that names the fault; else the first failed one; None: none failed.

    `limit` is a factor on the time that each check may take.
    """
    failed: list[Verdict] = []

    def enough(found: Verdict) -> bool:
        if found.outcome == "failed":
            failed.append(found)
        return is_named(wrong, found)

    judged(wrong.backend, enough, limit)
    return next((v for v in failed if is_named(wrong, v)), failed[0] if failed else None)


def is_named(wrong: Wrong, found: Verdict | None) -> bool:
    """Whether a verdict is a failure that names the fault."""
    if found is None or found.outcome != "failed":
        return False
    return re.search(wrong.words, found.message, re.IGNORECASE) is not None


def assert_caught(wrong: Wrong) -> None:
    """That the kit catches it, and names its fault."""
    found = caught(wrong)
    assert found is not None, f"{wrong} was not caught"
    assert is_named(wrong, found), found


def sampled(zoo: Sequence[Wrong], names: Sequence[str]) -> list[Wrong]:
    """Those of a zoo that have one of `names`. Raises where one has none, or two share a name."""
    by_name = {wrong.name: wrong for wrong in zoo}
    assert len(by_name) == len(zoo), "two have one name"
    return [by_name[name] for name in names]


def assert_right(found: Sequence[Verdict], passed: int = 5) -> None:
    """That no check failed, and that at least `passed` of them could be made."""
    wrong = [(v.name, v.message, v.case) for v in failures(found)]
    assert not wrong, wrong  # pytest explains no assertion of this file
    assert sum(v.outcome == "passed" for v in found) >= passed


def judged(
    backend: Callable[[], Backend],
    enough: Callable[[Verdict], bool] = lambda _: False,
    limit: float = 1.0,
) -> list[Verdict]:
    """The verdicts on a backend, until `enough`; each check in a child of this process.

    The child is a fork, so that what is not installed can be checked, and may crash or hang.
    """
    with uninstalled(backend()) as subject:
        checks = checks_of(subject)
        found: list[Verdict] = []
        while len(found) < len(checks):
            before = len(found)
            for one in _forked(checks[before:], limit):
                found.append(verdict(checks[len(found)]) if _IN_A_FORK in one.message else one)
                if enough(found[-1]):
                    return found
            if len(found) == before:  # cannot be: a check has a verdict or is lost
                raise AssertionError("a child said nothing")
        return found


def _forked(checks: list[Check], limit: float) -> Any:
    """The verdicts of a child on `checks`, as far as it comes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            for check in checks:
                os.write(write, json.dumps(verdict(check).to_dict()).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(write)
    try:
        yield from _read(checks, read, limit)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)


def _read(checks: list[Check], read: int, limit: float) -> Any:
    buffer = b""
    for check in checks:
        until = time.monotonic() + check.limit * limit
        while b"\n" not in buffer:
            if not select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
                yield not_there(check, f"did not end within {check.limit * limit:g} s")
                return
            if not (piece := os.read(read, 1 << 16)):
                yield not_there(check, "ended the process")
                return
            buffer += piece
        line, _, buffer = buffer.partition(b"\n")
        yield Verdict(**json.loads(line))
