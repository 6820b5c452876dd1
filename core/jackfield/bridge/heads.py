"""Heads for multi-token prediction at work: the tokens of several texts in one call of a layer.

A layer multiplies all of them at once; only what attends goes text by text, each by its own keys
and values. So `MtpModel` is given a cache that stands for those of all texts, and an attention that
parts what this returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jackfield.bridge.attention import KEY
from jackfield.bridge.mtp import cache_of

if TYPE_CHECKING:
    from torch import nn

_serial = itertools.count(1)


class Heads:
    """`made` is an `MtpModel`, with its weights. Call `install` first."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.layers = len(made.layers)
        self.device = next(made.layers.parameters()).device
        self._parted = _Parted()

    def install(self) -> Callable[[], None]:
        """Have the heads attend text by text. Returns what gives that back, and lets go of them."""
        key = f"{KEY}heads-{next(_serial)}"
        AttentionInterface.register(key, self._parted.attend)
        self._made.config._attn_implementation_internal = key

        def remove() -> None:
            AttentionInterface._global_mapping.pop(key, None)
            self._made = None

        return remove

    def cache(self) -> Any:
        """A new cache for one text, that takes tokens back."""
        return cache_of(self._made)

    def read(
        self,
        head: int,
        states: torch.Tensor,
        ids: Seq[Seq[int]],
        firsts: Seq[int],
        caches: Seq[Any],
    ) -> torch.Tensor:
        """What a head makes of `states`, `[1, tokens, hidden]`, and the tokens `ids` behind them.

        The first of `ids[i]` stands at the position `firsts[i]` of text i, whose cache grows.
        """
        positions = [range(first, first + len(own)) for first, own in zip(firsts, ids, strict=True)]
        flat = [[*itertools.chain(*ids)], [*itertools.chain(*positions)]]
        placed = torch.tensor(flat, device=self.device)
        self._parted.begin(caches, [len(own) for own in ids])
        found: torch.Tensor = self._made.forward_layer(
            head, states, placed[1:], self._parted, input_ids=placed[:1]
        )
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` of `states`, `[rows, hidden]`."""
        found: torch.Tensor = self._made._project_to_logits(states)
        return found


class _Parted:
    """Stands for the caches of several texts in a call of one layer, and attends for each."""

    def __init__(self) -> None:
        self._caches: Seq[Any] = ()
        self._new: Seq[int] = ()
        self._there: list[int] = []
        self._window: int | None = None

    def begin(self, caches: Seq[Any], new: Seq[int]) -> None:
        """A call with so many `new` tokens of each text."""
        self._caches, self._new = caches, new

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give each cache its part; what all of them hold, one behind the other."""
        parts = zip(
            self._caches, key.split([*self._new], 2), value.split([*self._new], 2), strict=True
        )
        keys, values = zip(*(cache.update(k, v, layer) for cache, k, v in parts), strict=True)
        self._there = [held.shape[2] for held in keys]
        self._window = getattr(self._caches[0].layers[layer], "sliding_window", None)
        self._caches = ()
        return (
            (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, 2), torch.cat(values, 2))
        )

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention of transformers' tables; it makes its masks itself."""
        there = self._there
        parts = zip(
            query.split([*self._new], 2), key.split(there, 2), value.split(there, 2), strict=True
        )
        found = [
            sdpa_attention_forward(module, q, k, v, self._mask(q, k), **kwargs)[0]
            for q, k, v in parts
        ]
        return torch.cat(found, 1), None

    def _mask(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """Which keys each of the last tokens sees; None: sdpa's own causal mask says it."""
        new, there, window = query.shape[2], key.shape[2], self._window
        if (window is None or there <= window) and new in (1, there):
            return None
        columns = torch.arange(there, device=query.device)
        behind = columns[there - new :, None] - columns
        return (behind >= 0) & (behind < (window or there))
