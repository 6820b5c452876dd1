"""Pages that leave the device for host memory and come back, while other steps go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.contracts import PackedLayer

#: Kinds of devices whose copies can run beside their kernels, each with a module of torch.
STREAMED = frozenset({"cuda", "xpu"})

#: Keys and values of some pages in host memory: `[pages, page_size, kv_heads, head_dim]` each.
HostPages = tuple[torch.Tensor, torch.Tensor]


class PageSwap:
    """Copies pages of the layers of one group; they are done when a call returns.

    Copies raise what torch raises where there is no memory for them, on the host or on the device.
    """

    def host_bytes(self, count: int, layers: Mapping[int, PackedLayer]) -> int:
        """The memory of the host that `count` pages take once they are out."""
        return sum(_sizes(count, layers))

    def out(self, pages: Seq[int], layers: Mapping[int, PackedLayer]) -> dict[int, HostPages]:
        """What the layers hold in `pages`, for `back` and nobody else.

        The pages may be given away at once; whoever writes to one calls `before_writing` first.
        """
        which = _index(pages, layers, pinned=False)
        return {
            index: (layer.keys[which].cpu(), layer.values[which].cpu())
            for index, layer in layers.items()
        }

    def back(
        self, pages: Seq[int], layers: Mapping[int, PackedLayer], saved: Mapping[int, HostPages]
    ) -> None:
        """Put into `pages` what `out` returned, before any step that begins after this call."""
        which = _index(pages, layers, pinned=False)
        for pool, host in _pools(layers, saved):
            pool.index_copy_(0, which, host.to(pool.device))

    def before_writing(self, pages: Iterable[int]) -> None:
        """Let no step write to `pages` before all copies have read them."""


class _Leaving(NamedTuple):
    """Pages that are read until the event `read`."""

    read: Any
    pages: frozenset[int]


class StreamedSwap(PageSwap):
    """Copies on a stream of their own, to and from page-locked memory: no host thread waits.

    The stream of the steps waits for a copy where it is about to write to pages that the copy still
    reads, or begins after pages have come back. `streams` is torch's module of the device
    (`torch.cuda`). `pinned`: whether host memory is page-locked; other memory is copied in steps
    that block.
    """

    def __init__(self, device: torch.device, streams: Any, *, pinned: bool = True) -> None:
        self._device = device
        self._streams = streams
        self._pinned = pinned
        self._own = streams.Stream(device)
        self._leaving: list[_Leaving] = []

    def host_bytes(self, count: int, layers: Mapping[int, PackedLayer]) -> int:
        """Torch page-locks blocks whose sizes are powers of two."""
        return sum(1 << (size - 1).bit_length() for size in _sizes(count, layers) if size)

    def out(self, pages: Seq[int], layers: Mapping[int, PackedLayer]) -> dict[int, HostPages]:
        self._own.wait_stream(self._steps)  # which may still write to them
        with self._streams.stream(self._own):
            which = _index(pages, layers, pinned=self._pinned)
            saved = {
                index: (self._host(layer.keys, which), self._host(layer.values, which))
                for index, layer in layers.items()
            }
            read = self._streams.Event()
            read.record()
        self._leaving = [entry for entry in self._leaving if not entry.read.query()]
        self._leaving.append(_Leaving(read, frozenset(pages)))
        return saved

    def back(
        self, pages: Seq[int], layers: Mapping[int, PackedLayer], saved: Mapping[int, HostPages]
    ) -> None:
        self._own.wait_stream(self._steps)  # which may still read what was in the pages
        try:
            with self._streams.stream(self._own):
                which = _index(pages, layers, pinned=self._pinned)
                for pool, host in _pools(layers, saved):
                    pool.index_copy_(0, which, host.to(pool.device, non_blocking=True))
        finally:  # also where memory runs out: the pages are written then by somebody else
            self._steps.wait_stream(self._own)

    def before_writing(self, pages: Iterable[int]) -> None:
        if not self._leaving:
            return
        written = set(pages)
        for entry in [e for e in self._leaving if not written.isdisjoint(e.pages)]:
            self._steps.wait_event(entry.read)
            self._leaving.remove(entry)

    @property
    def _steps(self) -> Any:
        """The stream that the thread of the steps uses, which is the one that calls."""
        return self._streams.current_stream(self._device)

    def _host(self, pool: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        if not pool.is_cpu:
            pool.record_stream(self._own)  # the pool may be given up before it was read
        shape = (len(which), *pool.shape[1:])
        host = torch.empty(shape, dtype=pool.dtype, device="cpu", pin_memory=self._pinned)
        return host.copy_(pool.index_select(0, which), non_blocking=True)


def swap_on(device: torch.device) -> PageSwap:
    """How pages leave `device`."""
    if device.type in STREAMED:
        return StreamedSwap(device, getattr(torch, device.type))
    return PageSwap()


def _index(pages: Seq[int], layers: Mapping[int, PackedLayer], *, pinned: bool) -> torch.Tensor:
    """The pages' numbers on the device, once for all layers."""
    device = next(iter(layers.values())).keys.device
    numbers = torch.tensor(pages, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return numbers.to(device, non_blocking=pinned)


def _sizes(count: int, layers: Mapping[int, PackedLayer]) -> Iterable[int]:
    """The bytes of so many pages, in each pool."""
    for layer in layers.values():
        for pool in (layer.keys, layer.values):
            yield count * pool[0].numel() * pool.element_size()


def _pools(
    layers: Mapping[int, PackedLayer], saved: Mapping[int, HostPages]
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Each pool with what is to come into it."""
    for index, (keys, values) in saved.items():
        yield layers[index].keys, keys
        yield layers[index].values, values
