"""``offloaded_static``: a static cache whose layers wait in main memory until it is their turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Cache, CacheCapabilities, Requirements
from jackfield.contracts.cache import not_fixed
from jackfield_plugins.cache.offloaded import LAYER_TYPES, no_second_device
from jackfield_plugins.cache.static import StaticCache
from jackfield_plugins.devices import on

if TYPE_CHECKING:
    import transformers


class OffloadedStaticCache(StaticCache):
    """Of fixed shape, but not at fixed addresses: a layer that comes back is put somewhere else."""

    name = "offloaded_static"
    capabilities = CacheCapabilities(layout="padded", layer_types=LAYER_TYPES)

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        return [
            *super().refuse(requirements, options),
            *not_fixed(requirements),
            *no_second_device(requirements),
        ]

    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        from jackfield_plugins.cache.offloading import WaitingStaticCache

        with on(context.device):  # its stream belongs to the current one
            return WaitingStaticCache(
                config=context.config,
                max_cache_len=self.columns(context.options, length),
                offloading=True,
                offload_only_non_sliding=False,
            )


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [OffloadedStaticCache()]
