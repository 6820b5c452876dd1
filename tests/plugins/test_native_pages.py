"""Memory of packed weights: whose it is, and that it lies in large pages."""

from __future__ import annotations

import copy
import mmap
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield_plugins.native import pages
from jackfield_plugins.quantizer.groupwise.linear import GroupwiseLinear
from jackfield_plugins.quantizer.groupwise.quantize import quantize
from jackfield_plugins.quantizer.groupwise.torch_kernel import TorchProduct

SIZES = (0, 1, 1 << 16, (1 << 16) + 1, 300_001, 1 << 24, (1 << 24) + 1, 40 << 20)


def assert_own(made: list[torch.Tensor]) -> None:
    """Each has its own bytes, as a line of a cache begins, and nothing in them."""
    for number, one in enumerate(made):
        assert one.data_ptr() % 64 == 0
        assert not one.any()
        one.fill_(number % 250 + 1)
    assert all((one == number % 250 + 1).all() for number, one in enumerate(made))


def test_each_has_its_own_memory() -> None:
    assert_own([pages.zeros(size) for size in SIZES * 2])


def test_threads_do_not_share_a_place() -> None:
    with ThreadPoolExecutor(4) as threads:
        assert_own(list(threads.map(pages.zeros, [70_000 + i for i in range(600)])))


def test_memory_lives_as_long_as_a_tensor() -> None:
    first, last = pages.zeros(100_000), pages.zeros(100_000).fill_(7)
    del first
    for _ in range(20):
        pages.zeros(1 << 24).fill_(9)
    assert (last == 7).all()


def test_a_copy_takes_what_it_needs() -> None:
    one = pages.zeros(100_000).fill_(3)
    assert one.untyped_storage().nbytes() == 100_000
    assert torch.equal(copy.deepcopy(one), one)
    assert torch.nn.Parameter(one, requires_grad=False).share_memory_().is_shared()


@pytest.mark.parametrize(
    ("name", "value"), [("_ADVICE", None), ("_ADVICE", -1), ("_CHUNK", 1 << 62)], ids=str
)
def test_without_such_pages_memory_is_what_it_was(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that has none, that knows no such advice, or that has no room."""
    monkeypatch.setattr(pages, "_chunk", None)
    monkeypatch.setattr(pages, name, value)
    assert_own([pages.zeros(size) for size in SIZES])


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has large pages")
def test_packed_weights_lie_in_large_pages() -> None:
    layer = GroupwiseLinear(256, 1024, False, TorchProduct())
    layer.set_weight(quantize(torch.randn(1024, 256)))
    assert "hg" in flags_at(layer.qweight.data_ptr()).split()


def flags_at(address: int) -> str:
    """What Linux says of the mapping where this lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line
    raise AssertionError("no such mapping")
