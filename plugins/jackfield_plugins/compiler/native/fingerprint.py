"""Fingerprints of code and settings: equal wherever a step is traced to the same graph.

Functions count by their bytecode, wherever they come from: a file, a notebook, or a patch that
replaced a method or a function.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from transformers import PreTrainedConfig

from jackfield_plugins.compiler.reaching import Place

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, range, slice)
_SHORT = 64
#: Attributes of models and configs that say where they came from.
FROM = frozenset({"name_or_path", "_name_or_path", "_commit_hash"})
_OTHERS = FROM | {"generation_config", "_is_hf_initialized"}
_WITHIN = 8  # objects in objects
_FEW = 1024  # numbers of a tensor that code may read one by one


class Fingerprints:
    """Values as text; long ones by their digest, and each worked out once.

    Raises TypeError where a value has no text that tells it from others of its type.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Any]] = {}  # values live on: an id stands for one of them

    def of(self, value: Any, within: int = 0) -> str:
        if isinstance(value, (*_PLAIN, *_NAMED)):
            return f"{value.dtype} {value!r}" if isinstance(value, np.generic) else repr(value)
        if (known := self._known.get(id(value))) is not None:
            return known[0]
        self._known[id(value)] = "itself", value  # where it leads back to itself
        text = self._text(value, within)
        if len(text) > _SHORT:
            text = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        self._known[id(value)] = text, value
        return text

    def _text(self, value: Any, within: int) -> str:
        if isinstance(value, dict):
            pairs = [f"{self.of(k, within)}: {self.of(v, within)}" for k, v in value.items()]
            return "{" + ", ".join(sorted(pairs)) + "}"
        if isinstance(value, list | tuple):
            return f"[{', '.join([self.of(one, within) for one in value])}]"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(self.of(one, within) for one in value))}}}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return f"array {value.dtype} {self._tensor(torch.from_numpy(value))}"
        if isinstance(value, nn.Module):  # one that is no part of the model, or a wrapped function
            own = [settings_of(value), value._modules, value._parameters, value._buffers]
            return f"{_name(value)} {self.of(type(value).forward)} {self.of(own, within + 1)}"
        if (parts := _parts(value)) is not None:
            return f"{_name(value)} ({', '.join([self.of(one, within) for one in parts])})"
        if isinstance(value, OpOverload | torch.finfo):
            return f"{_name(value)} {value}"
        if isinstance(value, logging.Logger):  # without its level: nothing is said in a graph
            return f"{_name(value)} {value.name}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, type) or type(value).__module__.partition(".")[0] == "torch":
            return _name(value)
        if value is ... or value is NotImplemented or type(value) is object:
            return _name(value)
        inside = _inside(value)
        if within == _WITHIN or inside is None:
            raise TypeError(f"an object of {_name(value)} has no text")
        shaping = {name: one for name, one in inside.items() if name not in FROM}
        return f"{_name(value)} {self.of(shaping, within + 1)}"

    def _tensor(self, tensor: torch.Tensor) -> str:
        text = f"tensor {tensor.dtype} {[*tensor.shape]} {tensor.device}"
        few = tensor.numel() <= _FEW and tensor.device.type == "cpu"
        return f"{text} {tensor.tolist()}" if few and type(tensor) is torch.Tensor else text

    def of_places(self, places: Iterable[Place]) -> Iterator[str]:
        """What lies where code finds it by name."""
        for place in sorted(places, key=lambda place: place.label):
            yield f"{place.label} {self.of(place.found)}"


def _parts(value: Any) -> list[Any] | None:
    """What makes something that can be called what it is; None: nothing of the kind."""
    if isinstance(value, types.CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars
        return [value.co_code, *names, value.co_consts]
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.partial | functools.partialmethod):
        return [value.func, value.args, value.keywords]
    if isinstance(value, PreTrainedConfig):
        return [{name: one for name, one in value.to_dict().items() if name not in FROM}]
    return None


def settings_of(module: nn.Module) -> dict[str, Any]:
    """What a module has been told, without its tensors, modules and hooks."""
    return {
        name: value
        for name, value in vars(module).items()
        if name == "training" or name not in nn.Module.__annotations__
        if not isinstance(value, nn.Module) and name not in _OTHERS
    }


def _inside(value: Any) -> dict[str, Any] | None:
    """What an object has; None: nobody can see it."""
    slots = [one for cls in type(value).__mro__ for one in _slots(cls)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {**getattr(value, "__dict__", {}), **found}


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it
        return ...


def _name(value: Any) -> str:
    """Where something is defined, or its type."""
    of = value if isinstance(value, type | types.FunctionType) else type(value)
    return f"{of.__module__}.{of.__qualname__}"
