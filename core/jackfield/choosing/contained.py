"""While a stranger's plugin loads: what it prints is kept, and what it changes is put back."""

from __future__ import annotations

import contextlib
import gc
import io
import locale
import logging
import os
import random
import reprlib
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")


@contextlib.contextmanager
def contained(*, writes: bool) -> Iterator[list[str]]:
    """Yields a list that, at the end, says what was printed and what was put back.

    `writes`: it is known to write to file descriptor 1, which leads nowhere for that time.
    Threads that were there before print as ever.
    """
    problems: list[str] = []
    before = [(part, part.read()) for part in PARTS]
    filters = warnings.filters[:]
    with _descriptors(problems, writes), _streams(problems), warnings.catch_warnings():
        try:
            yield problems
        finally:
            changed = [part.what for part, value in before if _put_back(part, value)]
            added = [f for f in warnings.filters if f not in filters]
            gone = any(f not in warnings.filters for f in filters)
            if gone or any(f[1] is None and f[3] is None for f in added):
                changed.append("the filters of all warnings")
    for action, message, category, module, line in reversed(added):
        if message is not None or module is not None:  # of its libraries, for messages of theirs
            texts = (getattr(p, "pattern", p) or "" for p in (message, module))
            warnings.filterwarnings(action, next(texts), category, next(texts), line)  # type: ignore[arg-type]
    if changed:
        problems.append(f"it changed {', '.join(changed)} while it loaded, which was put back")


class Part(NamedTuple):
    """Something that a whole process shares. `read` gives what compares, `write` puts it back.

    `read` gives None while there is no such thing, and `fresh` is what it then begins with.
    """

    what: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    fresh: Callable[[], Any] = lambda: None


def _put_back(part: Part, before: Any) -> bool:
    """Whether it had to be."""
    now = part.read()
    if now is not None and before is None:
        before = part.fresh()
    if now == before:
        return False
    with contextlib.suppress(OSError):  # a folder that is gone
        part.write(before)
    return True


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _set_folder(path: str | None) -> None:
    if path is not None:
        os.chdir(path)


def _set_collecting(on: bool) -> None:
    if on:
        gc.enable()
    else:
        gc.disable()


def _environment(values: dict[str, str]) -> None:
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


def _logging() -> tuple[Any, ...]:
    return logging.root.level, logging.root.manager.disable, tuple(logging.root.handlers)


def _set_logging(values: tuple[Any, ...]) -> None:
    logging.root.setLevel(values[0])
    logging.disable(values[1])
    logging.root.handlers[:] = values[2]


def _hooks() -> tuple[Any, ...]:
    return sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook


def _set_hooks(values: tuple[Any, ...]) -> None:
    sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook = values


def _builtins() -> dict[str, Any]:
    import builtins

    return vars(builtins)


def _set_builtins(values: dict[str, Any]) -> None:
    own = _builtins()
    for name in set(own) - set(values):
        del own[name]
    own.update(values)


def _torch() -> tuple[Any, ...] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_rng_state"):
        return None
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        bytes(torch.get_rng_state().tolist()),
    )


def _fresh_torch() -> tuple[Any, ...]:
    torch: Any = sys.modules["torch"]
    return torch.float32, "highest", False, bytes(torch.Generator().get_state().tolist())


def _set_torch(values: tuple[Any, ...]) -> None:
    torch: Any = sys.modules["torch"]
    torch.set_default_dtype(values[0])
    torch.set_float32_matmul_precision(values[1])
    torch.use_deterministic_algorithms(values[2])
    torch.set_rng_state(torch.tensor(list(values[3]), dtype=torch.uint8))


PARTS = (
    Part("the current folder", _folder, _set_folder),
    Part("environment variables", lambda: dict(os.environ), _environment),
    Part("sys.path", lambda: list(sys.path), lambda v: sys.path.__setitem__(slice(None), v)),
    Part("the root logger", _logging, _set_logging),
    Part("sys.excepthook or another hook", _hooks, _set_hooks),
    Part("the builtins", lambda: dict(_builtins()), _set_builtins),
    Part(
        "the locale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda v: locale.setlocale(locale.LC_ALL, v),
    ),
    Part("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Part("whether garbage is collected", gc.isenabled, _set_collecting),
    Part("Python's random numbers", random.getstate, random.setstate),
    Part("torch's defaults or random numbers", _torch, _set_torch, _fresh_torch),
)


@contextlib.contextmanager
def _streams(problems: list[str]) -> Iterator[None]:
    """The four names of standard output and error stand for kept ones; then they are as before."""
    own = {name: getattr(sys, name) for name in STREAMS}
    there = {thread.ident for thread in threading.enumerate()}
    kept = {n: Kept(s, there, sys.stderr) for n, s in own.items() if s is not None}
    for name, stream in kept.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        replaced = [n for n, s in kept.items() if getattr(sys, n, None) is not s]
        for name, stream in own.items():
            setattr(sys, name, stream)
        for name, stream in kept.items():
            if text := stream.end():
                told = "standard output" if "out" in name else "standard error"
                problems.append(f"it wrote to {told} while it loaded: {text}")
        if replaced:
            names = ", ".join(f"sys.{name}" for name in replaced)
            problems.append(f"it replaced {names} while it loaded, which was put back")


class _Bytes(io.BytesIO):
    def close(self) -> None:
        """Never: others print here, too."""


class Kept(io.TextIOWrapper):
    """Stands for a standard stream; what threads `there` before write goes to it as ever.

    The plugin may hold on to it: what it writes later goes to `later`, where nothing is spoilt.
    """

    def __init__(self, stream: Any, there: set[int | None], later: Any) -> None:
        self._bytes = _Bytes()
        super().__init__(self._bytes, "utf-8", "backslashreplace", "", write_through=True)
        self._stream, self._there, self._later = stream, there, later
        self._ended = False

    def _target(self) -> Any:
        """None: it is kept."""
        if self._ended:
            return self._later
        return self._stream if threading.get_ident() in self._there else None

    def write(self, text: str) -> int:
        target = self._target()
        return super().write(text) if target is None else target.write(text)

    def flush(self) -> None:
        if (target := self._target()) is not None:
            target.flush()

    @property
    def buffer(self) -> Any:
        target = self._target()
        return self._bytes if target is None else target.buffer

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        """Never: the stream is not the plugin's."""

    def end(self) -> str:
        """What was kept, for a message."""
        text = self._bytes.getvalue().decode(errors="backslashreplace")
        self._ended = True
        return reprlib.repr(" ".join(text.split())) if text else ""


@contextlib.contextmanager
def _descriptors(problems: list[str], writes: bool) -> Iterator[None]:
    """File descriptors 0, 1 and 2, and the timer of SIGALRM, are what they were."""
    saved = {number: os.dup(number) for number in (0, 1, 2) if _identity(number)}
    timer = signal.getitimer(signal.ITIMER_REAL) if hasattr(signal, "getitimer") else None
    if writes and 1 in saved:
        problems.append("it wrote to file descriptor 1 while it loaded, which is not passed on")
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    during = {number: _identity(number) for number in saved}
    try:
        yield
    finally:
        for number, copy in saved.items():
            if moved := _identity(number) != during[number]:
                problems.append(f"it closed or replaced file descriptor {number}: it was put back")
            if moved or (writes and number == 1):
                os.dup2(copy, number)
            os.close(copy)
        if timer is not None and not timer[0] and signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
            problems.append("it set the timer of SIGALRM, which was taken off")


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
