"""The memory behind pages: a pool of keys and one of values for each layer of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jackfield.contracts import PackedLayer, PackedStep, PageTables
from jackfield_plugins.cache.paged.reserved import Reserved, reserved

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOBODY = torch.empty(0, dtype=torch.int32)
NO_TABLES = PageTables(PackedStep([], _NOBODY, _NOBODY, 0, 0), None, 1, _NOBODY, _NOBODY, [], [])


class Pools:
    """The layers of a group, with `[capacity, page_size, kv_heads, head_dim]` for each."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.layers: dict[int, PackedLayer] = {}
        self._unseen: set[int] = set()  # whose pools were made before anything was written
        self._behind: dict[int, list[Reserved | None]] = {}  # the keys and values of a layer

    def allocate(
        self,
        index: int,
        capacity: int,
        keys: tuple[int, int],
        values: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        room: int = 0,
    ) -> None:
        """Make the pools of a layer before anything is written.

        Each grows up to `room` bytes without being copied, where the system has addresses for it.
        """
        self._behind[index] = [reserved(room, device) for _ in (keys, values)]
        made = [
            _zeros(behind, (capacity, self._page_size, *shape), dtype, device)
            for behind, shape in zip(self._behind[index], (keys, values), strict=True)
        ]
        self.layers[index] = PackedLayer(made[0], made[1], NO_TABLES)
        self._unseen.add(index)

    def layer(
        self, index: int, capacity: int, now: PageTables, keys: torch.Tensor, values: torch.Tensor
    ) -> PackedLayer:
        """The layer that is to hold `keys` and `values`, `[tokens, kv_heads, head_dim]`.

        Its pools are made anew where these were not what was expected.
        """
        layer = self.layers.get(index)
        if layer is not None and index not in self._unseen:
            return layer
        if layer is not None:
            pairs = ((layer.keys, keys), (layer.values, values))
            if all(
                (pool.shape[2:], pool.dtype, pool.device) == (new.shape[1:], new.dtype, new.device)
                for pool, new in pairs
            ):
                self._unseen.discard(index)
                return layer
            layer.replace(*(pool.new_empty(0, *pool.shape[1:]) for pool, _ in pairs))
            self._behind.pop(index, None)
        pages = (capacity, self._page_size)
        made = [states.new_zeros(*pages, *states.shape[1:]) for states in (keys, values)]
        self.layers[index] = PackedLayer(made[0], made[1], now)
        self._unseen.discard(index)  # not before: making them may fail
        return self.layers[index]

    def grow(self, capacity: int) -> None:
        """Give every layer `capacity` pages: in place, or by a copy of one layer after the other.

        Where one fails, those before it have grown, and are passed over the next time.
        """
        for index, layer in self.layers.items():
            if layer.keys.shape[0] >= capacity:
                continue
            behind = self._behind.get(index, (None, None))
            pools = zip((layer.keys, layer.values), behind, strict=True)
            layer.replace(*(_larger(pool, capacity, memory) for pool, memory in pools))

    def copy(self, page: int, into: int) -> None:
        for layer in self.layers.values():
            layer.keys[into] = layer.keys[page]
            layer.values[into] = layer.values[page]

    def point(self, tables: PageTables) -> None:
        """Have every layer read by `tables`."""
        for layer in self.layers.values():
            layer.tables = tables

    def close(self) -> None:
        """Let go of all tensors, whoever still has the layers."""
        for layer in self.layers.values():
            layer.replace(layer.keys.new_empty(0, 0, 0, 0), layer.values.new_empty(0, 0, 0, 0))
        self.point(NO_TABLES)
        self.layers.clear()
        self._behind.clear()

    @property
    def device(self) -> torch.device:
        return next(iter(self.layers.values())).keys.device

    def tensors(self) -> Iterable[torch.Tensor]:
        for layer in list(self.layers.values()):  # at once: another thread may ask in a first step
            yield layer.keys
            yield layer.values

    @property
    def num_bytes(self) -> int:
        """Memory of the pools, in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors())


def _zeros(
    behind: Reserved | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    made = behind.tensor(shape, dtype) if behind is not None else None
    return torch.zeros(shape, dtype=dtype, device=device) if made is None else made


def _larger(pool: torch.Tensor, capacity: int, behind: Reserved | None) -> torch.Tensor:
    shape = (capacity, *pool.shape[1:])
    if behind is not None and (grown := behind.tensor(shape, pool.dtype)) is not None:
        return grown
    larger = pool.new_zeros(shape)
    larger[: pool.shape[0]] = pool
    return larger
