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

import torch
from torch import nn
from transformers import PreTrainedConfig

from jackfield_plugins.compiler.reaching import Place, is_torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, range, slice)
_SHORT = 64
#: Attributes of models and configs that say where they came from.
FROM = frozenset({"name_or_path", "_name_or_path", "_commit_hash"})
_WITHIN = 3  # objects in objects
_FEW = 1024  # numbers of a tensor that code may read one by one


class Fingerprints:
    """Values as text; long ones by their digest, and each worked out once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Any]] = {}  # values live on: an id stands for one of them

    def of(self, value: Any, within: int = 0) -> str:
        if isinstance(value, (*_PLAIN, *_NAMED)):
            return repr(value)
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
        if isinstance(value, nn.Module):  # one that is no part of the model, or a wrapped function
            return f"{_name(value)} {self.of(type(value).forward)}"
        if (parts := _parts(value)) is not None:
            return f"{_name(value)} ({', '.join([self.of(one, within) for one in parts])})"
        inside, stands = getattr(value, "__dict__", None), is_torch(type(value).__module__)
        named = isinstance(value, type | types.ModuleType | logging.Logger)
        if named or stands or not inside or within == _WITHIN:
            return _name(value)
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
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
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


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _name(value: Any) -> str:
    """Where something is defined, or its type."""
    of = value if isinstance(value, type | types.FunctionType) else type(value)
    return f"{of.__module__}.{of.__qualname__}"
