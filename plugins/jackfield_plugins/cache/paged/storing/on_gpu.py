"""Keys and values on their way into the pools of a GPU: one kernel where torch has two."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from jackfield_plugins.interpreting import interpreting, without_triton

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import PackedLayer
    from jackfield_plugins.launching import Run

_BLOCK = 1024  # numbers that a program copies at once
_ALIGNED = 16  # what strides are multiples of, in numbers


def stored(
    layer: PackedLayer, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> bool:
    """Copy `[tokens, kv_heads, head_dim]` to `slots`, int64 `[tokens]`, of the pools.

    Returns False, and copies nothing, where they lie so that only torch can.
    """
    from jackfield_plugins.launching import as_arguments, launch

    pools = layer.flat_keys, layer.flat_values
    if not len(keys) == len(values) == len(slots) or not all(map(_fits, pools, (keys, values))):
        return False
    if len(slots):
        sizes = keys[0].numel(), values[0].numel()
        run = compiled(keys.device, keys.dtype, values.dtype, *sizes)
        given = as_arguments(_kernel(), keys, values, *pools, slots)
        launch(run, keys.device, (len(slots), 1, 1), *given, keys.stride(0), values.stride(0))
    return True


def _fits(pool: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether a token's numbers lie in a row, here and there, where the kernel reads them."""
    from jackfield_plugins.launching import is_aligned

    token, head, dense = states.stride()
    return (
        (pool.dtype, pool.device, pool.shape[1:]) == (states.dtype, states.device, states.shape[1:])
        and dense == 1
        and head == states.shape[2]
        and token % _ALIGNED == 0
        and pool.is_contiguous()
        and is_aligned(states)
        and is_aligned(pool)
    )


def warm(
    device: torch.device, dtype: torch.dtype, keys: tuple[int, int], values: tuple[int, int]
) -> None:
    """Compile it now, and in no request, for keys and values of so many heads and their size."""
    if available(device):
        compiled(device, dtype, dtype, math.prod(keys), math.prod(values))


@functools.cache
def available(device: torch.device) -> bool:
    """Whether there is a kernel for this device."""
    return device.type == "cuda" and not interpreting() and not without_triton()


def _kernel() -> Any:
    from jackfield_plugins.cache.paged.storing.kernels import store_kernel

    return store_kernel


@functools.cache
def compiled(
    device: torch.device, keys_dtype: torch.dtype, values_dtype: torch.dtype, keys: int, values: int
) -> Run:
    """The kernel for `keys` and `values` numbers a token."""
    import torch

    from jackfield_plugins.launching import overlapping

    types: dict[str, Any] = dict.fromkeys(("keys", "key_pool"), keys_dtype)
    types |= dict.fromkeys(("values", "value_pool"), values_dtype)
    types |= {"slots": torch.int64, "key_stride": _ALIGNED, "value_stride": _ALIGNED}
    fixed = {"KEYS": keys, "VALUES": values, "BLOCK": _BLOCK}
    return overlapping(_kernel(), types, fixed, device, num_warps=4)
