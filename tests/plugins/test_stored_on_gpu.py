"""Keys and values that a kernel in Triton stores, against torch's own two copies."""

from __future__ import annotations

import os

import pytest
import torch

from jackfield.contracts import PackedLayer, PackedStep, PageTables, Span

pytest.importorskip("triton", reason="needs jackfield[triton]")

from jackfield_plugins.cache.paged.storing.on_gpu import available, stored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, SIZE = 5, 4
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="Triton runs on a GPU or, with TRITON_INTERPRET=1, in Python",
)


def pools(kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype) -> PackedLayer:
    counts = torch.zeros(2, dtype=torch.int32)
    step = PackedStep([Span(0, 1, 1)], counts, counts[:1], 1, 1)
    tables = PageTables(step, None, SIZE, counts[None], counts[:1], [[0]], [0])
    keys, values = (
        torch.full((PAGES, SIZE, kv_heads, size), 7, dtype=dtype, device=DEVICE) for size in sizes
    )
    return PackedLayer(keys, values, tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "sizes"), [(2, (16, 16)), (3, (16, 48)), (9, (128, 128))])
def test_they_lie_where_torch_would_put_them(
    dtype: torch.dtype, kv_heads: int, sizes: tuple[int, int]
) -> None:
    for slots in ([3], [19, 0, 7, 8, 2]):
        given = torch.tensor([-1, *slots], device=DEVICE)[1:]  # at no round address
        states = [
            torch.randn(kv_heads, len(slots), size, device=DEVICE).to(dtype).transpose(0, 1)
            for size in sizes
        ]
        dense = [one.contiguous() for one in states]
        sizes_of_all = [one[0].numel() for one in dense]
        halves = torch.cat([one.flatten(1) for one in dense], 1).split(sizes_of_all, 1)
        fused = [one.unflatten(1, (kv_heads, -1)) for one in halves]
        for keys, values in (dense, fused):
            layer, due = pools(kv_heads, sizes, dtype), pools(kv_heads, sizes, dtype)
            assert stored(layer, given, keys, values)
            due.flat_keys.index_copy_(0, given, keys)
            due.flat_values.index_copy_(0, given, values)
            assert torch.equal(layer.keys, due.keys)
            assert torch.equal(layer.values, due.values)


def test_what_lies_or_is_otherwise_is_left_to_torch() -> None:
    slots = torch.tensor([1, 2, 3], device=DEVICE)
    right = torch.ones(3, 2, 16, device=DEVICE)
    others = {
        "heads first": torch.ones(2, 3, 16, device=DEVICE).transpose(0, 1),
        "every second number": torch.ones(3, 2, 32, device=DEVICE)[..., ::2],
        "tokens at odd addresses": torch.ones(3, 33, device=DEVICE)[:, :32].unflatten(1, (2, 16)),
    }
    for other in others.values():
        layer = pools(2, (16, 16), torch.float32)
        assert not stored(layer, slots, other, right)
        assert not stored(layer, slots, right, other)
        assert bool((layer.keys == 7).all() and (layer.values == 7).all())
    for odd in (right.double(), right.half(), torch.ones(3, 1, 16, device=DEVICE), right[:2]):
        layer = pools(2, (16, 16), torch.float32)
        assert not stored(layer, slots, odd, right)  # and torch says what is wrong
        assert not stored(layer, slots, right, odd)
        assert bool((layer.keys == 7).all() and (layer.values == 7).all())
    nothing = right[:0]
    assert stored(pools(2, (16, 16), torch.float32), slots[:0], nothing, nothing)


def test_a_processor_keeps_torchs() -> None:
    assert not available(torch.device("cpu"))
