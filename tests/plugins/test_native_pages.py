"""Memory of packed weights: whose it is, and that it lies in large pages."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield_plugins.native import pages
from jackfield_plugins.quantizer.gguf.native import KERNELS, Matrix, pack
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


def test_memory_lives_as_long_as_a_tensor_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_newest", None)
    first, last = pages.zeros(100_000), pages.zeros(100_000).fill_(7)
    chunk = pages._newest
    assert chunk is not None
    del first
    others = [pages.zeros(1 << 24).fill_(9) for _ in range(5)]
    assert (last == 7).all()
    assert chunk() is not None
    del last, others
    assert chunk() is None


def test_a_copy_takes_what_it_needs() -> None:
    one = pages.zeros(100_000).fill_(3)
    assert one.untyped_storage().nbytes() == 100_000
    assert torch.equal(copy.deepcopy(one), one)
    assert torch.nn.Parameter(one, requires_grad=False).share_memory_().is_shared()


NONE = [("_ADVICE", None), ("_ADVICE", -1), ("_CHUNK", 1 << 62)]


@pytest.mark.parametrize(("name", "value"), NONE, ids=str)
def test_without_such_pages_memory_is_what_it_was(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that has none, that knows no such advice, or that has no room."""
    monkeypatch.setattr(pages, "_newest", None)
    monkeypatch.setattr(pages, name, value)
    assert_own([pages.zeros(size) for size in SIZES])
    one = torch.ones(100_000)
    with torch.device("meta"):
        assert pages.moved(one) is one
        assert pages.zeros(100_000).is_cpu


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_what_is_moved_is_the_same(dtype: torch.dtype) -> None:
    for one in (torch.randn(300, 700).to(dtype), torch.randn(300, 700).to(dtype).t()):
        found = pages.moved(one)
        assert found.data_ptr() != one.data_ptr()
        assert found.is_contiguous()
        assert found.dtype is dtype
        assert torch.equal(found, one)
    for one in (torch.ones(5), torch.empty(0), torch.empty(1 << 20, device="meta")):
        assert pages.moved(one) is one


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="Linux alone has large pages"
)
def test_packed_weights_lie_in_large_pages() -> None:
    layer = GroupwiseLinear(256, 4096, False, TorchProduct())
    layer.set_weight(quantize(torch.randn(4096, 256)))
    packed = [layer.qweight, layer.scales]
    if not KERNELS["Q4_0"].cannot_build():
        packed.append(pack(torch.zeros(4096, 144, dtype=torch.uint8), Matrix("Q4_K", 4096, 256)))
    for weight in packed:
        assert "hg" in flags_at(weight.data_ptr()).split()


def flags_at(address: int) -> str:
    """What Linux says of the mapping where this lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line
    raise AssertionError("no such mapping")
