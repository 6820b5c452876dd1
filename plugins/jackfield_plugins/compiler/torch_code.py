"""What of torch a model's code calls by name, and whether it still is torch's.

torch is what its version says, but for what somebody put in the place of a function or a method of
it. torch.export runs such a patch twice or not at all.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from jackfield_plugins.compiler.reaching import Place, is_torch, names_of

#: transformers puts functions of its own into torch, while it is imported.
_FOLDERS = tuple(package.__path__[0] + os.sep for package in (torch, transformers))
#: Where models find functions and methods of torch.
_SPACES: dict[str, Mapping[str, Any]] = {
    "torch": vars(torch),
    "torch.nn.functional": vars(F),
    "torch.Tensor": vars(torch.Tensor),
}
#: No step calls these, since it makes no modules; torch.compile puts its own there when it first
#: runs.
_MAKING = frozenset({"__init__", "__setstate__"})
_CALLED = ("__call__", "__getattr__", "forward")
_WRAPPERS = (staticmethod, classmethod, property)


def torch_code(classes: Iterable[type], names: Iterable[str]) -> Iterator[Place]:
    """Torch's functions with these names and those that are called of modules, also as methods of
    the bases of `classes`, and all that these name in turn.

    A method that a tensor has from elsewhere is None, until somebody puts one in its place.
    """
    bases = {base for cls in classes for base in cls.__mro__ if issubclass(base, nn.Module)}
    own = (base for base in bases if is_torch(base.__module__))
    spaces = _SPACES | {f"{base.__module__}.{base.__qualname__}": vars(base) for base in own}
    wanted: set[str] = {*names, *_CALLED}
    known: set[str] = set()
    while new := wanted - known - _MAKING:
        known |= new
        for space in spaces.values():
            for name in new & space.keys():
                wanted |= _names(space[name])
    for label, space in sorted(spaces.items()):
        for name in sorted(known):
            found = space.get(name)
            inherited = found is None and label == "torch.Tensor" and hasattr(torch.Tensor, name)
            if inherited or _is_called(found):
                yield Place(f"{label}.{name}", space, name, found)


def _is_called(found: Any) -> bool:
    return isinstance(found, _WRAPPERS) or (callable(found) and not isinstance(found, type))


def _names(found: Any) -> set[str]:
    """What a function of torch looks up by name."""
    return names_of(found.__code__) if isinstance(found, types.FunctionType) else set()


def own_name(found: Any) -> str | None:
    """What torch calls what stands under a name in it; None: that is not torch's."""
    if isinstance(found, _WRAPPERS):
        return own_name(found.fget if isinstance(found, property) else found.__func__)
    home = str(getattr(found, "__module__", None) or "builtins")
    if isinstance(found, types.FunctionType):  # a patch may have taken over the name
        inner = inspect.unwrap(found)  # torch has decorators for functions of anybody
        codes = [one.__code__ for one in (found, inner) if isinstance(one, types.FunctionType)]
        own = all(code.co_filename.startswith(_FOLDERS) for code in codes)
    else:
        own = is_torch(home)
    return f"{home}.{getattr(found, '__qualname__', type(found).__qualname__)}" if own else None
