"""Whether a model still is what its step was traced and laid out from. Asked in every step."""

from __future__ import annotations

import sys
from operator import getitem, is_
from typing import Any

import torch
from torch import nn

from jackfield_plugins.compiler.native.told import functions_of, is_torch

#: Hooks that are called for all modules there are.
EVERYWHERE = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters")  # of PEFT's layers


class Held:
    """A model as it is now.

    Its structure are modules, their code, hooks and adapters, of which a graph was traced; its
    place is where its weights lie, which a program reads. Numbers may change in place.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
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
        #: which can be turned where they lie: of others the shape would no longer fit the model
        self._square = [t for t in self._tensors if t.dim() == 2 and t.shape[0] == t.shape[1]]
        self._addresses = self._now()
        self._modules, self._types = modules, list(map(type, modules))
        self._classes: list[Any] = list(dict.fromkeys(self._types))
        self._methods = self._of_classes()
        for file in dict.fromkeys(cls.__module__ for cls in self._classes):
            for key, function in functions_of(file).items() if not is_torch(file) else ():
                self._homes.append(vars(sys.modules[file]))
                self._names.append(key)
                self._found.append(function)
        self._hooks = [vars(module)[name] for module in modules for name in _HOOKS]
        self._hooks += EVERYWHERE
        self._hooked = self._hooking()
        self._own = [vars(module) for module in modules]
        self._forwards = self._patched()
        self._adapters = [(vars(m), name) for m in modules for name in _ADAPTERS if name in vars(m)]
        self._adapted = self._adapting()
        self.threads = torch.get_num_threads()

    def _now(self) -> list[int]:
        where = [tensor.data_ptr() for tensor in self._tensors]
        return where + [tensor.stride(0) for tensor in self._square]

    def _of_classes(self) -> list[Any]:
        return [cls.forward for cls in self._classes]

    def _hooking(self) -> list[tuple[int, ...]]:
        """torch numbers hooks, and gives no number twice."""
        return [tuple(hooks) for hooks in self._hooks if hooks]

    def _patched(self) -> list[Any]:
        """What somebody put in the place of a module's own code."""
        return [own.get("forward") for own in self._own]

    def _adapting(self) -> list[str]:
        return [repr(home[name]) for home, name in self._adapters]

    def is_structure(self) -> bool:
        """Whether modules, their code, hooks and adapters are the same."""
        try:
            same = all(map(is_, map(getitem, self._homes, self._names), self._found))
        except KeyError:
            return False
        return (
            same
            and all(map(is_, map(type, self._modules), self._types))
            and all(map(is_, self._of_classes(), self._methods))
            and self._hooking() == self._hooked
            and all(map(is_, self._patched(), self._forwards))
            and self._adapting() == self._adapted
        )

    def is_place(self) -> bool:
        """Whether weights lie where they lay, and torch has as many threads."""
        return self._now() == self._addresses and torch.get_num_threads() == self.threads
