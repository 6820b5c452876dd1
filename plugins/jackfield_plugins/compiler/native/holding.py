"""Whether a model still is what its step was traced and laid out from. Asked in every step."""

from __future__ import annotations

from operator import getitem, is_
from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters")  # of PEFT's layers


class Held:
    """A model as it is now.

    `structure`: modules, hooks and adapters, of which a graph was traced. `addresses`: where its
    weights lie, which a program reads. Numbers may change in place.
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
        self._addresses = self._now()
        self._hooks = [vars(module)[name] for module in modules for name in _HOOKS]
        self._hooked = list(map(len, self._hooks))
        self._own = [vars(module) for module in modules]
        self._forwards = self._patched()
        self._adapters = [(vars(m), name) for m in modules for name in _ADAPTERS if name in vars(m)]
        self._adapted = self._adapting()
        self.threads = torch.get_num_threads()

    def _now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def _patched(self) -> list[Any]:
        """What somebody put in the place of a module's own code."""
        return [own.get("forward") for own in self._own]

    def _adapting(self) -> list[str]:
        return [repr(home[name]) for home, name in self._adapters]

    def is_structure(self) -> bool:
        """Whether modules, hooks and adapters are the same."""
        try:
            same = all(map(is_, map(getitem, self._homes, self._names), self._found))
        except KeyError:
            return False
        return (
            same
            and list(map(len, self._hooks)) == self._hooked
            and all(map(is_, self._patched(), self._forwards))
            and self._adapting() == self._adapted
        )

    def is_place(self) -> bool:
        """Whether weights lie where they lay, and torch has as many threads."""
        return self._now() == self._addresses and torch.get_num_threads() == self.threads
