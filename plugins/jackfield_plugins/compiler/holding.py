"""Whether a model still is what its step was traced or recorded from. Asked in every step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import getitem, is_
from typing import Any

import numpy as np
import torch
from torch import nn

from jackfield_plugins.compiler.reaching import Reached, is_torch
from jackfield_plugins.compiler.torch_code import torch_code

#: Hooks that are called for all modules there are.
EVERYWHERE = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: What settings are, alone or in a container. A trace holds them as they were.
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})
_CONTAINERS = frozenset({dict, list, tuple, set})
_OF_TORCH = nn.Module.__annotations__.keys() - {"training"}
_DEEP = 4  # containers in containers
_STEPS = 64  # in which all of a model is looked at, if no request comes


class Held:
    """A model as it is now.

    Its structure are modules, their code, hooks and settings, of which a graph was traced; its
    place is where its weights lie, which a program reads. Numbers may change in place.

    To look at all of it takes as long as some layers do, since weights have pushed it out of the
    caches. So all of it is looked at when a request comes, and a part in every step.

    `closely`: nothing else guards what was made of the model. All of a class counts then, and each
    attribute by which object it is; and memory that weights have left stays until somebody looks.
    """

    def __init__(self, model: nn.Module, *, closely: bool = False) -> None:
        modules = list(model.modules())
        classes = dict.fromkeys(map(type, modules))
        self._parts = [
            _Modules(modules[at::_STEPS], closely) for at in range(min(_STEPS, len(modules)))
        ]
        self._code = _Code(list(classes), closely)
        #: Whether somebody is called for modules, who may do something else each time.
        self.is_hooked = any(EVERYWHERE) or any(part.is_hooked for part in self._parts)
        self._next = 0
        self._threads = torch.get_num_threads()

    def next_is_same(self) -> bool:
        """Whether the next part is the same, and torch has as many threads."""
        self._next = (self._next + 1) % len(self._parts)
        part = self._parts[self._next]
        same = torch.get_num_threads() == self._threads and part.is_structure() and part.is_place()
        return same and (self._next > 0 or self._code.is_same())

    def is_structure(self) -> bool:
        """Whether modules, their code, hooks and settings are the same."""
        return self._code.is_same() and all(part.is_structure() for part in self._parts)

    def is_code(self) -> bool:
        """Whether code and hooks are the same: torch guards settings, parts and what they are."""
        return self._code.is_same() and all(part.is_code() for part in self._parts)

    def is_place(self) -> bool:
        """Whether weights lie where they lay, and torch has as many threads."""
        same = torch.get_num_threads() == self._threads
        return same and all(part.is_place() for part in self._parts)


class _Code:
    """What is called for all modules of a class, of a file or at all."""

    def __init__(self, classes: Sequence[Any], closely: bool) -> None:
        self._classes = classes
        bases = dict.fromkeys(base for cls in classes for base in cls.__mro__) if closely else ()
        self._bodies = [(base, dict(vars(base))) for base in bases if not is_torch(base.__module__)]
        self._methods = self._of_classes()
        reached = Reached(classes)
        places = [*reached.places.values(), *torch_code(classes, reached.names)]
        #: What is changed where it lies is compared with how it was.
        self._lists = [
            (place.home, place.name, copy.deepcopy(place.found))
            for place in places
            if type(place.found) in _CONTAINERS and _is_plain(place.found, _DEEP)
        ]
        self._places = [place[1:] for place in places]
        self._hooked = self._hooking()

    def _of_classes(self) -> list[Any]:
        return [cls.forward for cls in self._classes]

    def _hooking(self) -> list[tuple[int, ...]]:
        return [tuple(hooks) for hooks in EVERYWHERE]

    def is_same(self) -> bool:
        return (
            all(map(is_, self._of_classes(), self._methods))
            and all(_is_same(vars(base), body) for base, body in self._bodies)
            and all(home.get(name) is found for home, name, found in self._places)
            and all(home[name] == before for home, name, before in self._lists)
            and self._hooking() == self._hooked
        )


class _Modules:
    """Some modules, as they are now."""

    def __init__(self, modules: Sequence[nn.Module], closely: bool) -> None:
        self._homes: list[Any] = []
        self._names: list[str] = []
        self._found: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        for module in modules:
            for home in (module._parameters, module._buffers, module._modules):
                for name, found in home.items():
                    self._homes.append(home)
                    self._names.append(name)
                    self._found.append(found)
                    if isinstance(found, torch.Tensor):
                        self._tensors.append(found)
        if closely:
            self._tensors += [
                found
                for module in modules
                for name, found in vars(module).items()
                if isinstance(found, torch.Tensor)
            ]
        plain = (torch.Tensor, nn.Parameter)
        self._memory = [t.untyped_storage() for t in self._tensors if closely and type(t) in plain]
        self._layout = self._now()
        self._modules, self._types = modules, list(map(type, modules))
        self._hooks = [vars(module)[name] for module in modules for name in _HOOKS]
        self._hooked = self._hooking()
        self._own = [vars(module) for module in modules]
        self._forwards = self._patched()
        self._settings = [(own, n) for own in self._own for n in own if _is_setting(n, own[n])]
        self._set = [copy.deepcopy(own[name]) for own, name in self._settings]
        self._kinds = list(map(type, self._set))
        #: Dictionaries in which nothing may be added, and what else modules have.
        self._sized: list[dict[str, Any]] = []
        self._others: list[tuple[dict[str, Any], str]] = []
        for module, own in zip(modules, self._own, strict=True):
            self._sized += [module._parameters, module._buffers, module._modules, own]
            self._others += [
                (own, n) for n in own if not _is_own(n, own[n]) and (closely or callable(own[n]))
            ]
        self._sizes = list(map(len, self._sized))
        self._before = [own[name] for own, name in self._others]

    def _now(self) -> list[Any]:
        """Where numbers lie, and how far apart: `data` can be another view of the same memory."""
        where = [tensor.data_ptr() for tensor in self._tensors]
        return where + [tensor.stride() for tensor in self._tensors]

    def _hooking(self) -> list[tuple[int, ...]]:
        """torch numbers hooks, and gives no number twice."""
        return [tuple(hooks) for hooks in self._hooks if hooks]

    def _patched(self) -> list[Any]:
        """What somebody put in the place of a module's own code."""
        return [own.get("forward") for own in self._own]

    def _is_set(self) -> bool:
        """Whether settings are the same, e.g. an adapter's scale, or that it is switched on."""
        now = [own.get(name, ...) for own, name in self._settings]
        return list(map(type, now)) == self._kinds and now == self._set

    def is_structure(self) -> bool:
        try:
            same = all(map(is_, map(getitem, self._homes, self._names), self._found))
        except KeyError:
            return False
        return (
            same
            and self.is_code()
            and self._is_set()
            and list(map(len, self._sized)) == self._sizes
            and all(own.get(n) is one for (own, n), one in zip(self._others, self._before))  # noqa: B905
        )

    def is_code(self) -> bool:
        """Whether types of modules, hooks and what stands for their code are the same."""
        return (
            all(map(is_, map(type, self._modules), self._types))
            and self._hooking() == self._hooked
            and all(map(is_, self._patched(), self._forwards))
        )

    @property
    def is_hooked(self) -> bool:
        return any(self._hooks)

    def is_place(self) -> bool:
        return self._now() == self._layout


def _is_same(now: Mapping[str, Any], before: dict[str, Any]) -> bool:
    """Whether there are the same names, each for the same object."""
    return len(now) == len(before) and all(
        now.get(name, ...) is one for name, one in before.items()
    )


def _is_setting(name: str, found: Any) -> bool:
    return name not in _OF_TORCH and _is_plain(found, _DEEP)


def _is_own(name: str, found: Any) -> bool:
    """Whether an attribute is torch's or a setting, which are looked at in other ways."""
    return name in _OF_TORCH or _is_plain(found, _DEEP)


def _is_plain(found: Any, deep: int) -> bool:
    if type(found) in _CONTAINERS:
        inside = found.values() if type(found) is dict else found
        return deep > 0 and all(_is_plain(one, deep - 1) for one in inside)
    return type(found) in _PLAIN or isinstance(found, np.generic)
