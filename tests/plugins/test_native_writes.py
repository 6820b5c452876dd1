"""Keys and values that a native call stores lie where `write` puts them, or there is no call."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from jackfield.contracts import PackedLayer
from jackfield_plugins.cache.paged.pools import NO_TABLES
from jackfield_plugins.cache.paged.storing import KERNEL, StepSlots, StoredStates

pytestmark = pytest.mark.skipif(
    bool(KERNEL.cannot_build()), reason="needs a C++ compiler, on Linux"
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STORE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)


def layer(dtype: torch.dtype = torch.float32, key: int = 6, value: int = 4) -> PackedLayer:
    pages = [torch.zeros(5, 3, 2, size, dtype=dtype) for size in (key, value)]
    return PackedLayer(pages[0], pages[1], NO_TABLES)


def states(dtype: torch.dtype, size: int, order: str) -> torch.Tensor:
    """`[4 tokens, 2 heads, size]`, as a model hands it over: heads first, tokens first, a slice."""
    if order == "heads":
        return torch.randn(2, 4, size).to(dtype).transpose(0, 1)
    return torch.randn(4, 2, size + 2 * (order == "slice")).to(dtype)[..., :size]


def stored(layer: PackedLayer, slots: torch.Tensor, keys: torch.Tensor, values: Any) -> Any:
    step = StepSlots()
    step.put(slots)
    return StoredStates(layer, keys, values, step).call


def run(call: Any) -> bool:
    held = ctypes.create_string_buffer(call.arguments, len(call.arguments))
    return STORE(call.function)(ctypes.addressof(held))


@pytest.mark.parametrize("order", ["heads", "tokens", "slice"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_stores_what_write_stores(dtype: torch.dtype, order: str) -> None:
    found, due, slots = layer(dtype), layer(dtype), torch.tensor([7, 0, 14, 3])
    keys, values = states(dtype, 6, order), states(dtype, 4, order)
    call = stored(found, slots, keys, values)
    assert call is not None
    assert run(call)
    due.flat_keys.index_copy_(0, slots, keys)
    due.flat_values.index_copy_(0, slots, values)
    assert torch.equal(found.keys, due.keys)
    assert torch.equal(found.values, due.values)


def test_its_calls_take_the_slots_of_the_next_step() -> None:
    found, step = layer(), StepSlots()
    keys, values = torch.ones(2, 2, 6), torch.ones(2, 2, 4)
    call = StoredStates(found, keys, values, step).call
    for slots in ([1, 5], [8], []):
        step.put(torch.tensor(slots, dtype=torch.int64))
        found.keys.zero_()
        assert run(call)
        assert found.flat_keys.any((1, 2)).nonzero()[:, 0].tolist() == slots


@pytest.mark.parametrize("slot", [15, -1, 10**12])
def test_a_slot_that_is_not_there_stores_nothing(slot: int) -> None:
    found = layer()
    call = stored(found, torch.tensor([1, slot]), torch.ones(2, 2, 6), torch.ones(2, 2, 4))
    assert call is not None
    assert not run(call)
    assert not found.keys.any()
    assert not found.values.any()


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (torch.ones(2, 2, 6).double(), torch.ones(2, 2, 4)),
        (torch.ones(2, 2, 5), torch.ones(2, 2, 4)),
        (torch.ones(2, 3, 6), torch.ones(2, 3, 4)),
        (torch.ones(2, 2, 6), torch.ones(2, 2, 4, device="meta")),
        (torch.ones(2, 6, 2).transpose(1, 2), torch.ones(2, 2, 4)),
    ],
    ids=["dtype", "size", "heads", "device", "strided"],
)
def test_what_it_cannot_copy_has_no_call(keys: torch.Tensor, values: torch.Tensor) -> None:
    assert stored(layer(), torch.tensor([0, 1]), keys, values) is None
