"""``offloaded_static``: a static cache whose layers wait in main memory until it is their turn."""

from __future__ import annotations

from typing import Any

from jackfield import hookimpl
from jackfield.contracts import Cache, CacheCapabilities, Requirements
from jackfield.contracts.cache import not_fixed
from jackfield_plugins.cache.offloaded import LAYER_TYPES, no_second_device
from jackfield_plugins.cache.static import StaticCache


class OffloadedStaticCache(StaticCache):
    """Of fixed shape, but not at fixed addresses: a layer that comes back is put somewhere else."""

    name = "offloaded_static"
    capabilities = CacheCapabilities(layout="padded", layer_types=LAYER_TYPES)
    offloading = True

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        return [
            *super().refuse(requirements, options),
            *not_fixed(requirements),
            *no_second_device(requirements),
        ]


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [OffloadedStaticCache()]
