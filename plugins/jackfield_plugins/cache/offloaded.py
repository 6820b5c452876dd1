"""``offloaded``: a dynamic cache whose layers wait in main memory until it is their turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Cache, CacheCapabilities, Requirements
from jackfield_plugins.cache.dynamic import DynamicCache
from jackfield_plugins.devices import on

if TYPE_CHECKING:
    import transformers

#: Without linear layers, whose state transformers leaves on the device, and without rollback,
#: which nothing has shown to be right while layers are under way.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def no_second_device(requirements: Requirements) -> list[str]:
    """Why layers cannot be offloaded from where the model is."""
    if requirements.device == "cpu":
        return ["there is no second device: the model on cpu has its layers in main memory already"]
    if requirements.device != "cuda":
        return [f"transformers offloads on CUDA streams, which {requirements.device} does not have"]
    if len(requirements.execution_devices) > 1:
        names = ", ".join(requirements.execution_devices)
        return [f"fetches layers to one device, and they compute on {names}"]
    return []


class OffloadedCache(DynamicCache):
    """The layer that attends and the next one are on the device, the others in main memory."""

    name = "offloaded"
    auto_rank = None  # only by name
    capabilities = CacheCapabilities(layout="padded", layer_types=LAYER_TYPES)

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        return super().refuse(requirements, options) + no_second_device(requirements)

    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        from jackfield_plugins.cache.offloading import WaitingDynamicCache

        with on(context.device):  # its stream belongs to the current one
            return WaitingDynamicCache(config=context.config, offloading=True)


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [OffloadedCache()]
