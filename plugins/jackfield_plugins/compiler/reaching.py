"""What a model's code finds by name outside of itself: constants, functions, classes, settings.

A trace holds all of it as it was, so it belongs to what a graph is kept by, and to what is looked
at while one runs.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

_WRAPPERS = (staticmethod, classmethod, property, functools.partial, functools.partialmethod)
_INSTALLED = sysconfig.get_path("purelib")
#: They are told by their versions, or by their sources.
_LIBRARIES = {"torch", "transformers", "numpy", "jackfield", "jackfield_plugins"}


class Place(NamedTuple):
    """What lies under `name` in `home`; `label` says where that is, in any process."""

    label: str
    home: Mapping[str, Any]
    name: str
    found: Any


def is_torch(home: str) -> bool:
    """Whether a module is one of torch's, which stay as they are."""
    return home == "builtins" or _top(home) == "torch"


def _is_library(home: str) -> bool:
    """Whether a module is of a library that code is not followed into."""
    top = _top(home)
    return top in _LIBRARIES or (top in sys.stdlib_module_names and top != "__main__")


def _top(home: str) -> str:
    return home.partition(".")[0]


def _is_code(found: Any) -> bool:
    return isinstance(found, (types.FunctionType, types.MethodType, *_WRAPPERS))


def _is_called(found: Any) -> bool:
    return _is_code(found) or (callable(found) and not isinstance(found, type))


class Reached:
    """All that the code of some classes of modules names, and what they and their bases have.

    Code of libraries is not followed, but for the files in which the classes stand. Of these all
    functions count, as some are found by a name that is made at run time.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        bases = {base for cls in classes for base in cls.__mro__}
        bases -= {*PreTrainedModel.__mro__, *GenerationMixin.__mro__}  # no step runs these
        own = sorted((b for b in bases if not is_torch(b.__module__)), key=_name)
        self.places: dict[str, Place] = {}
        #: where there is code of nobody whose version is known
        self.modules: set[str] = set()
        self._homes = {cls.__module__ for cls in own}
        self._tops = {_top(home) for home in self._homes if not _is_library(home)}
        self.names: set[str] = set()  # that code looks up
        self._seen: set[int] = set()
        self._next: list[tuple[str, Any]] = []
        for cls in own:
            self._body(cls)
        for home in sorted(self._homes & sys.modules.keys()):
            beside = vars(sys.modules[home])
            for name, found in list(beside.items()):
                if _is_called(found):
                    self._put(home, beside, name, found)
        while self._next:
            self._follow(*self._next.pop())
        self.places = {
            label: place
            for label, place in self.places.items()
            if place.name in self.names or _is_called(place.found)
        }

    def _put(self, label: str, home: Mapping[str, Any], name: str, found: Any) -> str:
        at = f"{label}.{name}"
        self.places.setdefault(at, Place(at, home, name, found))
        return at

    def _follow_all(self, label: str, home: Mapping[str, Any]) -> None:
        for name, found in list(home.items()):
            if not name.startswith("__") or callable(found):
                self._next.append((self._put(label, home, name, found), found))

    def _body(self, cls: type) -> None:
        """What a class has, by itself."""
        if not _is_library(cls.__module__):
            self.modules.add(cls.__module__)
        self._follow_all(_name(cls), vars(cls))

    def _is_open(self, home: str) -> bool:
        """Whether code is followed into a module: not into what others have installed."""
        if home in self._homes or _top(home) in self._tops:
            return True
        if _is_library(home):
            return False
        self.modules.add(home)
        file = getattr(sys.modules.get(home), "__file__", None)
        return file is None or not Path(file).is_relative_to(_INSTALLED)

    def _follow(self, label: str, found: Any) -> None:
        if isinstance(found, (str, int, float, bytes, type(None))) or id(found) in self._seen:
            return
        self._seen.add(id(found))
        if isinstance(found, types.FunctionType):
            self._function(label, found)
        elif _is_code(found):
            self._next += [(label, one) for one in _within(found)]
        elif isinstance(found, type):
            for base in found.__mro__:
                if self._is_open(base.__module__):
                    self._body(base)
        elif isinstance(found, list | tuple):
            self._next += [(label, one) for one in found]
        elif isinstance(found, dict):
            self._next += [(label, one) for one in found.values()]
        elif self._is_open(type(found).__module__):
            self._next.append((label, type(found)))
            inside = getattr(found, "__dict__", None)
            if isinstance(inside, dict) and not isinstance(found, nn.Module):
                self._follow_all(label, inside)

    def _function(self, label: str, function: types.FunctionType) -> None:
        spaces = function.__globals__
        home = str(spaces.get("__name__"))
        self._next += [(label, one) for one in _within(function)]
        if not self._is_open(home):
            return
        if not _is_library(home):
            self.modules.add(home)
        names = sorted(names_of(function.__code__))
        self.names.update(names)
        for name in names:
            if name in spaces:
                found = spaces[name]
                self._next.append((self._put(home, spaces, name, found), found))
                if isinstance(found, types.ModuleType) and self._is_open(found.__name__):
                    beside = vars(found)
                    for one in names:
                        if one in beside:
                            at = self._put(found.__name__, beside, one, beside[one])
                            self._next.append((at, beside[one]))


def names_of(code: types.CodeType) -> set[str]:
    """What code looks up by name, in the functions within it too."""
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= names_of(one)
    return found


def _within(found: Any) -> Iterator[Any]:
    """What something that is called calls in turn."""
    if isinstance(found, types.FunctionType):
        yield from found.__defaults__ or ()
        yield from (found.__kwdefaults__ or {}).values()
        yield getattr(found, "__wrapped__", None)
        for cell in found.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
    elif isinstance(found, property):
        yield found.fget
    elif isinstance(found, functools.partial | functools.partialmethod):
        yield from (found.func, *found.args, *found.keywords.values())
    else:
        yield found.__func__


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
