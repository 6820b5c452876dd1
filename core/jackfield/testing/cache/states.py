"""Keys and values as functions of what a model has read: a mix-up shows at once."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

Shapes = Seq[tuple[tuple[int, int], tuple[int, int]]]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class States:
    """Keys and values of any token of any text, in each layer.

    Two tokens have the same ones where all tokens up to them are the same, and the cache salt is.

    Attributes:
        shapes: Of a token's keys and values in each layer, `(heads, head_dim)` each.
        dtype: Theirs.
        device: Where they are.
    """

    shapes: Shapes
    dtype: torch.dtype
    device: str = "cpu"
    _known: dict[tuple[int, int], Pair] = field(default_factory=dict)

    def chain(self, tokens: Seq[int], salt: str = "") -> list[int]:
        """One number for each token: of all that was read up to it."""
        number, found = zlib.crc32(salt.encode()), []
        for token in tokens:
            number = zlib.crc32(token.to_bytes(4, "little"), number)
            found.append(number)
        return found

    def of(self, number: int, layer: int) -> Pair:
        """Keys and values of a token, by its number of `chain`: each `[heads, head_dim]`."""
        if (known := self._known.get((number, layer))) is None:
            generator = torch.Generator().manual_seed(number * 64 + layer)
            keys, values = (
                torch.randn(shape, generator=generator).to(self.device, self.dtype)
                for shape in self.shapes[layer]
            )
            known = self._known[number, layer] = (keys, values)
        return known

    def full(self, shape: tuple[int, ...], number: float) -> torch.Tensor:
        """`number` everywhere, like keys and values."""
        return torch.full(shape, number, dtype=self.dtype, device=self.device)

    def several(self, numbers: Seq[int], layer: int) -> Pair:
        """The same of several tokens, each `[tokens, heads, head_dim]`, tensors of their own."""
        pairs = [self.of(number, layer) for number in numbers]
        keys, values = (torch.stack(states) for states in zip(*pairs, strict=True))
        return keys, values
