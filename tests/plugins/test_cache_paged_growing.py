"""Pools that grow: in place where addresses were reserved, by a copy otherwise, and never wrong."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref

import pytest
import torch
from families import build, oracle, prompts

import jackfield
from jackfield_plugins.cache.paged import pools as module
from jackfield_plugins.cache.paged.pools import Pools
from jackfield_plugins.cache.paged.reserved import Reserved, reserved
from jackfield_plugins.cache.paged.store import PagedKVCache

SHAPE, PAGE = (2, 8), 4
ONE = PAGE * 2 * 8 * 4  # bytes of a page
CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="addresses are reserved on Linux")


def pools_of(room: int) -> Pools:
    made = Pools(PAGE)
    for index in range(2):
        made.allocate(index, 2, SHAPE, SHAPE, torch.float32, CPU, room)
    for tensor in made.tensors():
        assert not tensor.any()
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1)
    return made


def held(pools: Pools, pages: int) -> None:
    for tensor in pools.tensors():
        assert tensor.shape == (pages, PAGE, *SHAPE)
        first = 2 * PAGE * 16
        assert tensor.flatten()[:first].tolist() == list(range(1, first + 1))
        assert not tensor.flatten()[first:].any()
        assert tensor.untyped_storage().nbytes() == pages * ONE


@linux
def test_a_pool_grows_where_it_lies() -> None:
    pools = pools_of(64 * ONE)
    before = [tensor.data_ptr() for tensor in pools.tensors()]
    kept = pools.layers[0].keys
    for pages in (4, 8, 64):
        pools.grow(pages)
        assert [tensor.data_ptr() for tensor in pools.tensors()] == before
        held(pools, pages)
    pools.layers[0].keys[0, 0, 0, 0] = -1
    assert kept[0, 0, 0, 0] == -1
    pools.close()
    assert kept[0, 0, 0, 0] == -1  # whoever still has it, reads memory that is there
    assert pools.num_bytes == 0


@pytest.mark.parametrize("room", [0, 1, 2 * ONE, 5 * ONE])
def test_beyond_its_room_it_is_copied(room: int) -> None:
    pools = pools_of(room)
    for pages in (4, 8, 16):
        pools.grow(pages)
        held(pools, pages)


@linux
@pytest.mark.parametrize("room", [1, 3 * ONE])
def test_what_was_reserved_goes_once_it_is_too_small(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that were written there would take as much memory again."""
    memories: list[weakref.ref[object]] = []

    class Watched(Reserved):
        def __init__(self, num_bytes: int) -> None:
            super().__init__(num_bytes)
            memories.append(weakref.ref(self._memory))

    monkeypatch.setattr("jackfield_plugins.cache.paged.reserved.Reserved", Watched)
    pools = pools_of(room)
    pages = 2 * mmap.PAGESIZE // ONE  # more than any room here
    pools.grow(pages)
    gc.collect()
    assert [memory() for memory in memories] == [None] * 4
    held(pools, pages)


@linux
def test_pools_that_are_too_large_from_the_start_keep_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Reserved(1)
    gone = weakref.ref(memory._memory)
    monkeypatch.setattr(module, "reserved", lambda *_: memory)
    pools = Pools(PAGE)
    pools.allocate(0, 2 * mmap.PAGESIZE // ONE, SHAPE, SHAPE, torch.float32, CPU, 1)
    assert gone() is None
    assert not pools.layers[0].keys.any()


@pytest.mark.parametrize(
    ("windows", "sharing"),
    [((None, None), 2), ((8, None, 8, 8), 1), ((8, None, 16, None), 2), ((8, 8, 8), 3)],
)
def test_layers_without_a_window_share_what_is_free(
    windows: tuple[int | None, ...], sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    monkeypatch.setattr(module, "reserved", lambda room, _: rooms.append(room))
    monkeypatch.setattr("jackfield_plugins.cache.paged.store.free_bytes", lambda _: 1 << 20)
    cache = PagedKVCache(windows, PAGE, None, CPU)
    cache.allocate([(SHAPE, SHAPE)] * len(windows), "float32")
    assert rooms == [(1 << 20) // (2 * sharing)] * 2 * len(windows)
    cache.close()


@linux
def test_nothing_is_reserved_of_addresses_that_are_limited() -> None:
    """Of `ulimit -v`: what is reserved would be missing where memory is asked for."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pytest.skip("this process has a limit already")
    assert reserved(1 << 20, CPU) is not None
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, hard))
    try:
        assert reserved(1 << 20, CPU) is None
        pools = pools_of(64 * ONE)
        pools.grow(8)
        held(pools, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_systems_that_have_no_addresses_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("jackfield_plugins.cache.paged.reserved.Reserved", none)
    assert reserved(1 << 20, CPU) is None
    pools = pools_of(64 * ONE)
    pools.grow(8)
    held(pools, 8)


@linux
def test_reserving_takes_no_memory() -> None:
    """What is reserved is not in use, and given back when the last tensor is gone."""

    def mapped(name: str) -> int:
        with open("/proc/self/status") as status:
            (line,) = (line for line in status if line.startswith(name))
        return int(line.split()[1])

    before, addresses = mapped("VmRSS"), mapped("VmSize")
    memory = Reserved(1 << 36)
    tensor = memory.tensor((1 << 20,), torch.float32)
    assert tensor is not None
    assert mapped("VmRSS") - before < 1 << 14  # KiB
    assert mapped("VmSize") - addresses > 1 << 25
    assert memory.tensor((1 << 35,), torch.float32) is None
    del memory
    assert tensor.sum() == 0
    del tensor
    assert mapped("VmSize") - addresses < 1 << 20


def test_texts_are_the_same_whether_it_grows_in_place_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = prompts((5, 100, 17, 90))
    expected = [oracle(build("llama"), text, 9) for text in texts]
    for copied in (False, True):
        if copied:
            monkeypatch.setattr(module, "reserved", lambda *_: None)
        with jackfield.load(build("llama"), cache_implementation="paged?page_size=1") as engine:
            found = engine.generate(texts, max_new_tokens=9)
        assert [one.token_ids for one in found] == expected
