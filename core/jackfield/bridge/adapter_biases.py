"""Biases of the model that an adapter brings its own of (PEFT's ``bias="all"`` and "lora_only").

PEFT writes them over the model's, which would then be lost: here both are kept, and switched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from jackfield.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class _Bias(NamedTuple):
    parameter: nn.Parameter
    model: torch.Tensor
    adapter: torch.Tensor


#: what was found where an adapter was loaded here; a live model came with its own
_known: WeakKeyDictionary[Any, list[_Bias]] = WeakKeyDictionary()


def biases_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of every bias of a model without an adapter, by name; none that lies on disk."""
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name.endswith("bias") and parameter.device.type != "meta"
    }


def note_biases(model: PreTrainedModel, before: dict[str, torch.Tensor]) -> None:
    """Remember which of the biases `before` an adapter, loaded meanwhile, has written over."""
    _known[model] = [
        _Bias(parameter, mine, parameter.detach().clone())
        for name, parameter in model.named_parameters()
        if (mine := before.get(name.replace(".base_layer.", "."))) is not None
        and not torch.equal(mine, parameter)
    ]


class Biases:
    """The biases of a model with an adapter that brings some, or one that does not."""

    def __init__(self, model: PreTrainedModel, *, brought: bool) -> None:
        has = brought and any(name.endswith("bias") for name, _ in model.named_parameters())
        self._kept = _known.get(model, [])
        self._lost = has and model not in _known

    def switch(self, *, on: bool) -> None:
        """Put the adapter's, or the model's, in their places. Raises UsageError: they are lost."""
        if self._lost and not on:
            raise UsageError(
                "the adapter of this live model came with biases (bias='all' or 'lora_only') which "
                "replaced the model's, so that it cannot be switched off; load the model from "
                "its folder, with adapter=…"
            )
        with torch.no_grad():
            for bias in self._kept:
                bias.parameter.copy_(bias.adapter if on else bias.model)
