"""While a stranger's plugin loads: what it prints is kept, and what it changes is put back.

Other threads go on meanwhile, and what they print and change is theirs. So what is put back is
only what the plugin was seen to change in a process of its own (`trial_process`), thing by thing:
nothing of a plugin that changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jackfield.registry.kept_streams import STREAMS, KeptStream

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
                if names := _put_back(part, values, own):
                    seen.changes[part.what] = names
    if told := [part.what for part in PARTS if part.what in seen.changes]:
        seen.problems.append(f"it changed {', '.join(told)} while it loaded, which was put back")


class Part(NamedTuple):
    """Something that a whole process shares: names and values, of which each is put back alone.

    `fresh` is what it begins with where there was no such thing before.
    """

    what: str
    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], object]
    drop: Callable[[str], object] = lambda name: None
    fresh: Callable[[], dict[str, Any]] = dict


def _put_back(part: Part, before: dict[str, Any], own: Collection[str] | None) -> list[str]:
    """The names of what had to be; of others than `own` it is somebody else who changed them."""
    now = part.read()
    before = before or (part.fresh() if now else {})
    names = [n for n in {**before, **now} if own is None or n in own]
    names = [n for n in names if not (n in before and n in now and _same(before[n], now[n]))]
    for name in names:
        with contextlib.suppress(OSError):  # a folder that is gone
            if name in before:
                part.write(name, before[name])
            else:
                part.drop(name)
    return names


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _folder() -> dict[str, Any]:
    try:
        return {"": os.getcwd()}
    except OSError:
        return {}


def _path() -> dict[str, Any]:
    """Its entries; None behind each, since another one in front of it does not change it."""
    return dict.fromkeys(sys.path)


def _add_path(name: str, _: Any) -> None:
    sys.path.append(name)


def _drop_path(name: str) -> None:
    sys.path.remove(name)


def _logging() -> dict[str, Any]:
    root = logging.root
    return {"level": root.level, "disable": root.manager.disable, "handlers": tuple(root.handlers)}


def _set_logging(name: str, value: Any) -> None:
    if name == "level":
        logging.root.setLevel(value)
    elif name == "disable":
        logging.disable(value)
    else:
        logging.root.handlers[:] = value


#: name -> the module that has it
_HOOKS: dict[str, Any] = {
    "sys.excepthook": sys,
    "sys.displayhook": sys,
    "sys.unraisablehook": sys,
    "threading.excepthook": threading,
    "warnings.showwarning": warnings,
}


def _hooks() -> dict[str, Any]:
    return {name: getattr(own, name.partition(".")[2]) for name, own in _HOOKS.items()}


def _builtins() -> dict[str, Any]:
    import builtins

    return vars(builtins)


class _Filters:
    """Filters of warnings. What a library says of messages of its own changes nobody else's."""

    def __init__(self) -> None:
        self.all = list(warnings.filters)

    def __eq__(self, later: object) -> bool:
        """Whether none is gone since, and none came that is of all warnings."""
        assert isinstance(later, _Filters)
        came = [f for f in later.all if f not in self.all]
        gone = [f for f in self.all if f not in later.all]
        return not gone and all(map(_is_of_its_own, came))

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        came = [f for f in warnings.filters if f not in self.all and _is_of_its_own(f)]
        warnings.filters[:] = [*came, *self.all]  # type: ignore[index]
        with warnings.catch_warnings():  # tells it that they are others
            pass


def _is_of_its_own(one: Any) -> bool:
    _, message, _, module, _ = one
    return message is not None or module is not None


def _torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_rng_state"):
        return {}
    return {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": bytes(torch.get_rng_state().tolist()),
    }


def _fresh_torch() -> dict[str, Any]:
    torch: Any = sys.modules["torch"]
    random = bytes(torch.Generator().get_state().tolist())
    return {
        "dtype": torch.float32,
        "precision": "highest",
        "deterministic": False,
        "random": random,
    }


def _set_torch(name: str, value: Any) -> None:
    torch: Any = sys.modules["torch"]
    if name == "dtype":
        torch.set_default_dtype(value)
    elif name == "precision":
        torch.set_float32_matmul_precision(value)
    elif name == "deterministic":
        torch.use_deterministic_algorithms(value)
    else:
        torch.set_rng_state(torch.tensor(list(value), dtype=torch.uint8))


PARTS = (
    Part("the current folder", _folder, lambda _, value: os.chdir(value)),
    Part(
        "environment variables",
        lambda: dict(os.environ),
        os.environ.__setitem__,
        lambda name: os.environ.pop(name, None),
    ),
    Part("sys.path", _path, _add_path, _drop_path),
    Part("the root logger", _logging, _set_logging),
    Part(
        "sys.excepthook or another hook",
        _hooks,
        lambda name, value: setattr(_HOOKS[name], name.partition(".")[2], value),
    ),
    Part(
        "the builtins",
        lambda: dict(_builtins()),
        lambda name, value: _builtins().__setitem__(name, value),
        lambda name: _builtins().pop(name, None),
    ),
    Part(
        "the filters of all warnings", lambda: {"": _Filters()}, lambda _, value: value.put_back()
    ),
    Part(
        "Python's random numbers",
        lambda: {"": random.getstate()},
        lambda _, value: random.setstate(value),
    ),
    Part("torch's defaults or random numbers", _torch, _set_torch, fresh=_fresh_torch),
)


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
                os.dup2(copy, number)
            os.close(copy)
        if timed and signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
            seen.add(TIMER, "", "it set the timer of SIGALRM, which was taken off")


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
