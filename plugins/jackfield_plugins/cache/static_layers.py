"""Layers of a static cache that ask the device for nothing: where they end is known on the host.

transformers' own count in a tensor, which compiled code reads where it lies; whoever needs the
number in Python waits for the device. Their sliding ones send an index in each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

if TYPE_CHECKING:
    import transformers


class Counted(StaticLayer):
    """Of all tokens. Says on the host how many columns are written."""

    written = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, *args, **kwargs
        )
        self.written += key_states.shape[-2]
        return found

    def get_seq_length(self) -> int:
        return self.written

    def reset(self) -> None:
        super().reset()
        self.written = 0


class Rolling(StaticSlidingWindowLayer):
    """Of a window. Moves a full one on by a token, and sends nothing for it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[-2] != 1 or self.cumulative_length_int < self.max_cache_len:
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        for kept, new in ((keys, key_states), (values, value_states)):
            kept.copy_(torch.cat([kept[..., 1:, :], new], -2))
        return keys, values


_OWN: dict[type, type] = {StaticLayer: Counted, StaticSlidingWindowLayer: Rolling}


def count_on_host(cache: transformers.Cache) -> None:
    """Have the layers of a cache that nobody has written to be those of this module.

    What torch compiles with a cache in it would be compiled anew for each number of columns.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.__class__ = _OWN.get(type(layer), type(layer))
