"""State of the whole process that a plugin may change as it loads: read, and put back."""

from __future__ import annotations

import contextlib
import gc
import locale
import logging
import os
import random
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Something that a whole process shares: names and values, of which each is put back alone.

    `fresh` is what it begins with where there was no such thing before.
    """

    what: str
    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], object]
    drop: Callable[[str], object] = lambda name: None
    fresh: Callable[[], dict[str, Any]] = dict


def put_back(part: Part, before: dict[str, Any], own: Collection[str] | None) -> list[str]:
    """Put back what `part` was before. Returns the names of what had to be.

    Of others than `own` it is somebody else who changed them.
    """
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


def _mask() -> int:
    """The bits that new files do not get. To ask is to set them, here to files of one's own."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _collect(on: bool) -> None:
    (gc.enable if on else gc.disable)()


#: name -> how a setting of the process is read and written
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
    "mode of new files": (_mask, os.umask),
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "digits": (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "switches of threads": (sys.getswitchinterval, sys.setswitchinterval),
    "garbage": (gc.isenabled, _collect),
    "timeout of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
}


def _settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SETTINGS.items()}


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
        "the locale or another setting of Python",
        _settings,
        lambda name, value: _SETTINGS[name][1](value),
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
