"""transformers' offloaded caches, whose copies wait for one another on every version.

A layer travels to main memory and is read on the default stream; the next one comes back on a
stream of its own. Up to transformers 5.19 that stream waits for nothing: it reads what has not
arrived in main memory yet, and writes to memory that is still read. On no version does the default
stream wait before rows are taken out, while the first layer is still on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    _Base = transformers.Cache
else:
    _Base = object


class _Waits(_Base):
    """Before a class of transformers: both streams wait for what the other one was given before.

    The copies coming back are those of one device, which the cache is made for.
    """

    @property
    def _default(self) -> torch.cuda.Stream | None:
        """The stream that computes; None before anything is stored."""
        layers: Any = self.layers  # linear ones, which are not offloaded, know no device
        device = next((layer.device for layer in layers if layer.is_initialized), None)
        return None if device is None else torch.cuda.default_stream(device)

    def prefetch(self, *args: Any, **kwargs: Any) -> None:
        if (default := self._default) is not None:
            self.prefetch_stream.wait_stream(default)
        super().prefetch(*args, **kwargs)

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        if (default := self._default) is not None:
            default.wait_stream(self.prefetch_stream)
        super().reorder_cache(*args, **kwargs)


class WaitingDynamicCache(_Waits, transformers.DynamicCache):
    """`DynamicCache(offloading=True)`."""


class WaitingStaticCache(_Waits, transformers.StaticCache):
    """`StaticCache(offloading=True)`."""
