"""While a plugin of another package loads: its output is captured, and its changes are undone.

Other threads go on meanwhile; what they print and change stays. So only those things are put back
which the plugin was seen to change in a process of its own (`trial_process`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from jackfield.registry.kept_streams import STREAMS, KeptStream
from jackfield.registry.process_state import PARTS, put_back

TIMER, DESCRIPTORS, PRINTS = "the timer of SIGALRM", "file descriptors", "standard streams"

#: part of the process -> names of what was changed in it
Changes = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class Seen:
    """What a plugin did while it loaded: for a reader, and as a later `contained` wants it."""

    problems: list[str] = field(default_factory=list)
    changes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, part: str, name: str, problem: str) -> None:
        self.changes.setdefault(part, []).append(name)
        self.problems.append(problem)


@contextlib.contextmanager
def contained(changes: Changes | None = None, *, writes: bool = False) -> Iterator[Seen]:
    """Yields what, at the end, says what was printed and what was put back.

    Only what is in `changes` is; None: everything, as nobody knows what the plugin does. `writes`:
    it is known to write to file descriptor 1, which leads nowhere for that time.
    """
    seen = Seen()
    parts = [part for part in PARTS if changes is None or part.what in changes]
    before = [(part, part.read()) for part in parts]
    with _descriptors(seen, changes, writes), _streams(seen, changes is None or PRINTS in changes):
        try:
            yield seen
        finally:
            for part, values in before:
                own = None if changes is None else changes[part.what]
                if names := put_back(part, values, own):
                    seen.changes[part.what] = names
    if told := [part.what for part in PARTS if part.what in seen.changes]:
        seen.problems.append(f"it changed {', '.join(told)} while it loaded, which was put back")


@contextlib.contextmanager
def _streams(seen: Seen, known: bool) -> Iterator[None]:
    """The four names of standard output and error stand for kept ones; then they are as before.

    `known`: the plugin prints or replaces them, also in threads of its own.
    """
    own = {name: getattr(sys, name) for name in STREAMS}
    there = {thread.ident for thread in threading.enumerate()} if known else None
    kept = {n: KeptStream(s, there, sys.stderr) for n, s in own.items() if s is not None}
    for name, stream in kept.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        replaced = [n for n, s in kept.items() if getattr(sys, n, None) is not s]
        for name, stream in own.items():
            if known or name not in replaced:
                setattr(sys, name, stream)
        for name, stream in kept.items():
            if text := stream.end():
                told = "standard output" if "out" in name else "standard error"
                seen.add(PRINTS, name, f"it wrote to {told} while it loaded: {text}")
        if known and replaced:
            names = ", ".join(f"sys.{name}" for name in replaced)
            problem = f"it replaced {names} while it loaded, which was put back"
            seen.add(PRINTS, names, problem)


@contextlib.contextmanager
def _descriptors(seen: Seen, changes: Changes | None, writes: bool) -> Iterator[None]:
    """File descriptors 0, 1 and 2, and the timer of SIGALRM, are what they were."""
    own = "012" if changes is None else changes.get(DESCRIPTORS, ())
    moving = {number for number in (0, 1, 2) if str(number) in own}
    wanted = moving | ({1} if writes else set())
    saved = {number: os.dup(number) for number in wanted if _identity(number)}
    timed = hasattr(signal, "getitimer") and (changes is None or TIMER in changes)
    timed = timed and not signal.getitimer(signal.ITIMER_REAL)[0]
    if 1 in saved:
        flush_c()  # what was printed before is not the plugin's
    if writes and 1 in saved:
        seen.problems.append(
            "it wrote to file descriptor 1 while it loaded, which is not passed on"
        )
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    during = {number: _identity(number) for number in saved}
    try:
        yield
    finally:
        for number, copy in saved.items():
            if moved := number in moving and _identity(number) != during[number]:
                problem = f"it closed or replaced file descriptor {number}: it was put back"
                seen.add(DESCRIPTORS, str(number), problem)
            if moved or (writes and number == 1):
                flush_c()  # while it leads where the plugin's output goes
                os.dup2(copy, number)
            os.close(copy)
        if timed and signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
            seen.add(TIMER, "", "it set the timer of SIGALRM, which was taken off")


def flush_c() -> None:
    """What C code has printed is written now, not when the process or a fork of it ends.

    Only standard output: all streams would wait for a thread that reads from a terminal.
    """
    import ctypes  # where it is needed: few plugins write

    name = "__stdoutp" if sys.platform == "darwin" else "stdout"
    with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
        library = ctypes.CDLL(None)
        library.fflush(ctypes.c_void_p.in_dll(library, name))


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
