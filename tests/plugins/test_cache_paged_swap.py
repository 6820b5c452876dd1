"""Swapped pages on streams: equal after any order of steps, and no two streams race for a page.

Fake streams note who waits for whom. A clock a stream has says of each access to a page whether it
comes after another one whatever the timing, as in a detector of data races (Lamport 1978).
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield.contracts import ScheduledSequence, Sequence, Settings, Step
from jackfield_plugins.cache.paged import groups, swapped, swapping
from jackfield_plugins.cache.paged.store import PagedKVCache
from jackfield_plugins.cache.paged.swapping import PageSwap, StreamedSwap, swap_on

PAGE, PAGES, LAYERS = 4, 12, 2
SETTINGS = Settings(max_new_tokens=8)
DEVICE = torch.device("cpu")


class Streams:
    """In the place of `torch.cuda`: streams that keep vector clocks."""

    def __init__(self) -> None:
        self.now = self.steps = FakeStream()
        self.made: list[FakeStream] = [self.steps]

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        assert device == DEVICE
        self.made.append(FakeStream())
        return self.made[-1]

    def Event(self) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class FakeStream:
    def __init__(self) -> None:
        self.clock: Counter[int] = Counter()  # stream -> the last of its operations that is past
        self.waits = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.waits += 1
        self.clock |= other.clock

    def wait_event(self, event: FakeEvent) -> None:
        self.waits += 1
        self.clock |= event.clock


class FakeEvent:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def record(self) -> None:
        self.clock = Counter(self._streams.now.clock)

    def query(self) -> bool:
        return False  # copies take for ever, for all that the host knows


class Races(TorchDispatchMode):
    """Every access of a stream to a page of a pool; two that nothing orders are a race."""

    def __init__(self, streams: Streams, store: PagedKVCache) -> None:
        super().__init__()
        self.streams, self.store = streams, store
        self.seen: defaultdict[tuple[int, int], list[tuple[int, int, bool]]] = defaultdict(list)
        self.found: list[str] = []

    def pools(self) -> dict[int, int]:
        layers = [layer for g in self.store.groups.values() for layer in g.pools.layers.values()]
        return {t.untyped_storage().data_ptr(): PAGE for la in layers for t in (la.keys, la.values)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        pool = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if pool is not None and pool.untyped_storage().data_ptr() in self.pools():
            if name in ("aten::index_select", "aten::index_copy_"):
                whole = pool.shape[0] == PAGES
                where = args[2].tolist()
                pages = {w if whole else w // PAGE for w in where}
                self.access(pool, pages, writes=name.endswith("_"))
            elif name == "aten::copy_":  # copy-on-write, into one page
                self.access(pool, {pool.storage_offset() // pool.numel()}, writes=True)
        return func(*args, **(kwargs or {}))

    def access(self, pool: torch.Tensor, pages: set[int], *, writes: bool) -> None:
        stream = self.streams.now
        me = self.streams.made.index(stream)
        stream.clock[me] += 1
        for page in pages:
            memory = pool.untyped_storage().data_ptr()
            for who, when, wrote in self.seen[memory, page]:
                if (writes or wrote) and stream.clock[who] < when:
                    self.found.append(f"page {page}: stream {me} beside stream {who}")
            self.seen[memory, page].append((me, stream.clock[me], writes))


def driven(store: PagedKVCache, seed: int, rounds: int = 60) -> Iterator[dict[int, list[float]]]:
    """Sequences that come, grow, are preempted and go; what each one's pages hold."""
    chance = random.Random(seed)
    running: list[Sequence] = []
    waiting = [Sequence(n, list(range(100 * n, 100 * n + 30)), SETTINGS) for n in range(20)]
    for _ in range(rounds):
        if running and chance.random() < 0.4:
            preempted = running.pop(chance.randrange(len(running)))
            store.preempt(preempted)
            waiting.append(preempted)
        if waiting and store.admit(waiting[0]):
            running.append(waiting.pop(0))
            yield held(store, running)
        scheduled = []
        for sequence in running:
            left = 30 - sequence.num_cached
            step = Step(
                [*scheduled, ScheduledSequence(sequence, sequence.num_cached, min(left, 3), ())]
            )
            if left and store.fits(step):
                scheduled = step.scheduled
        if not scheduled:
            continue
        step = Step(scheduled)
        inputs = store.prepare(step)
        tokens = inputs.kwargs["input_ids"][0].double()[:, None, None].expand(-1, 2, 3)
        for layer in range(LAYERS):
            store.write(layer, tokens + layer, -tokens - layer)
        attend(store)
        store.commit(step, [f.num_tokens for f in scheduled])
        yield held(store, running)
        for sequence in [s for s in running if s.num_cached == 30]:
            running.remove(sequence)
            store.release([sequence])


def handed_over(store: PagedKVCache) -> None:
    """A sequence comes back into the pages of one that has just run and gone."""
    first, second = (Sequence(n, list(range(10)), SETTINGS) for n in (1, 2))
    assert store.admit(first)
    step(store, first, 10)
    store.preempt(first)
    assert store.admit(second)
    second.tokens = list(range(44))
    step(store, second, 44)
    attend(store)
    store.release([second])
    assert store.admit(first)


def attend(store: PagedKVCache) -> None:
    """Read what an attention reads."""
    for group in store.groups.values():
        for layer in group.pools.layers.values():
            pages = layer.block_table.flatten().long()
            layer.keys.index_select(0, pages)
            layer.values.index_select(0, pages)


def held(store: PagedKVCache, running: list[Sequence]) -> dict[int, list[float]]:
    """The tokens that every running sequence's pages hold, in all layers."""
    found: dict[int, list[float]] = {}
    for sequence in running:
        for group in store.groups.values():
            table = group.tables[sequence.id]
            count = sequence.num_cached - table.first
            for index, layer in group.pools.layers.items():
                for pool in (layer.keys - index, -layer.values - index):
                    read = pool.flatten(0, 1)[slots(table)][:count, 0, 0].tolist()
                    found.setdefault(sequence.id, []).extend(read)
                    assert read == sequence.tokens[table.first : sequence.num_cached]
    return found


def slots(table: Any) -> list[int]:
    return [page * PAGE + at for page in table.pages for at in range(PAGE)]


def store_on(swap: Any, window: int | None, patch: pytest.MonkeyPatch) -> PagedKVCache:
    patch.setattr(groups, "swap_on", lambda device: swap)
    return PagedKVCache([window] * LAYERS, PAGE, PAGE * PAGES, DEVICE, swap=True)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", range(4))
def test_pages_come_back_as_they_were_and_no_stream_races(
    seed: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams()
    swap = StreamedSwap(DEVICE, streams, pinned=False)
    store = store_on(swap, window, monkeypatch)
    with Races(streams, store) as races:
        streamed = list(driven(store, seed))
    plain = list(driven(store_on(PageSwap(), window, monkeypatch), seed))
    assert streamed == plain
    assert races.found == []
    assert {who for own in races.seen.values() for who, *_ in own} == {0, 1}  # both were at work
    assert any(streamed)


def test_pages_of_a_sequence_that_has_gone_are_read_before_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams()
    store = store_on(StreamedSwap(DEVICE, streams, pinned=False), None, monkeypatch)
    with Races(streams, store) as races:
        handed_over(store)
    assert races.found == []


@pytest.mark.parametrize(
    "mutant",
    ["leaves unwritten", "comes unread", "is read before it came", "is written while it leaves"],
)
def test_each_wait_is_needed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    swap = StreamedSwap(DEVICE, streams, pinned=False)
    own, steps = streams.made[1], streams.made[0]
    inside: list[str] = []
    for name in ("out", "back"):
        method = getattr(swap, name)

        def noting(*args: Any, name: str = name, method: Any = method) -> Any:
            inside.append(name)
            return method(*args)

        monkeypatch.setattr(swap, name, noting)
    lost = {
        "leaves unwritten": (own, "wait_stream", "out"),
        "comes unread": (own, "wait_stream", "back"),
        "is read before it came": (steps, "wait_stream", "back"),
        "is written while it leaves": (steps, "wait_event", "out"),
    }
    stream, wait, where = lost[mutant]
    honest = getattr(stream, wait)

    def waits(other: Any) -> None:
        if inside[-1] != where and wait == "wait_stream":
            honest(other)

    monkeypatch.setattr(stream, wait, waits)
    raced = []
    for drive in (lambda store: list(driven(store, 0)), handed_over):
        store = store_on(swap, None, monkeypatch)
        with Races(streams, store) as races:
            drive(store)
        raced += races.found
    assert raced


def test_a_step_waits_only_for_pages_that_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    store = store_on(StreamedSwap(DEVICE, streams, pinned=False), None, monkeypatch)
    first, second = (Sequence(n, list(range(10)), SETTINGS) for n in (1, 2))
    for sequence in (first, second):
        assert store.admit(sequence)
        step(store, sequence, 10)
    left = set(store.groups[None].tables[1].pages)
    store.preempt(first)
    second.tokens = list(range(44))
    before = streams.steps.waits
    step(store, second, 1)
    assert not left & set(store.groups[None].tables[2].pages)
    assert streams.steps.waits == before
    while not left & set(store.groups[None].tables[2].pages):
        assert streams.steps.waits == before
        step(store, second, 1)
    assert streams.steps.waits == before + 1


def step(store: PagedKVCache, sequence: Sequence, count: int) -> None:
    taken = Step([ScheduledSequence(sequence, sequence.num_cached, count, ())])
    store.prepare(taken)
    for layer in range(LAYERS):
        numbers = torch.zeros(count, 2, 3, dtype=torch.float64)
        store.write(layer, numbers, numbers)
    store.commit(taken, [count])


def test_numbers_of_pages_go_to_the_device_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    honest = swapping._index
    monkeypatch.setattr(swapping, "_index", lambda *a, **k: made.append(a) or honest(*a, **k))
    store = store_on(StreamedSwap(DEVICE, Streams(), pinned=False), None, monkeypatch)
    sequence = Sequence(1, list(range(30)), SETTINGS)
    assert store.admit(sequence)
    step(store, sequence, 10)
    store.preempt(sequence)
    assert len(made) == 1
    assert store.admit(sequence)
    assert len(made) == 2


def test_a_gpu_swaps_on_streams_and_a_processor_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("a stream of", device))
    device = torch.device("cuda:1")
    made = swap_on(device)
    assert isinstance(made, StreamedSwap)
    assert (made._own, made._pinned) == (("a stream of", device), True)
    assert type(swap_on(torch.device("cpu"))) is type(swap_on(torch.device("mps"))) is PageSwap


PER_PAGE = PAGE * 2 * 3 * 8 * 2 * LAYERS  # bytes: of keys and values, 2 heads of 3 float64


def filled(store: PagedKVCache, counts: list[int]) -> list[Sequence]:
    made = [Sequence(n, list(range(count)), SETTINGS) for n, count in enumerate(counts)]
    for sequence, count in zip(made, counts, strict=True):
        assert store.admit(sequence)
        step(store, sequence, count)
    return made


def test_what_is_swapped_takes_a_part_of_the_host_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest is preempted all the same, and computed again; told once."""
    total = 6 * PER_PAGE
    store = store_on(PageSwap(), None, monkeypatch)
    monkeypatch.setattr(
        swapped, "free_bytes", lambda _: total - store._swapped.num_bytes
    )  # what is swapped is not free
    sequences = filled(store, [4, 8, 4, 4])
    for sequence in sequences:
        store.preempt(sequence)
    usage = store.usage()
    assert (usage.swapped, usage.not_swapped) == (2, 2)  # three pages of the six
    assert store._swapped.num_bytes == 3 * PER_PAGE
    assert "may take 0.5 of both" in caplog.text
    assert len(caplog.records) == 1
    assert all(store.admit(sequence) for sequence in sequences)
    assert [s.num_cached for s in sequences] == [4, 8, 0, 0]
    assert store._swapped.num_bytes == 0
    store.preempt(sequences[0])
    store.release([sequences[0]])
    assert store._swapped.num_bytes == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("way", ["out", "back"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.one_in(4)
def test_where_no_memory_is_left_texts_go_on(
    window: int | None,
    way: str,
    streamed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other copy fails, in the middle of it; what is swapped and what is not stays right."""
    errors = itertools.cycle(
        [RuntimeError("CUDA error"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError()]
    )
    streams = Streams()
    swap = StreamedSwap(DEVICE, streams, pinned=False) if streamed else PageSwap()
    calls = 0
    name = "index_copy_" if way == "back" else "index_select"
    honest = getattr(torch.Tensor, name) if streamed or way == "back" else torch.Tensor.cpu

    def failing(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += inside
        if inside and calls % 6 == 3:
            raise next(errors)
        return honest(tensor, *args)

    inside, method = 0, getattr(swap, way)

    def copying(*args: Any) -> Any:
        nonlocal inside
        inside = 1
        try:
            return method(*args)
        finally:
            inside = 0

    monkeypatch.setattr(swap, way, copying)
    store = store_on(swap, window, monkeypatch)
    monkeypatch.setattr(torch.Tensor, honest.__name__, failing)
    with Races(streams, store) as races:
        assert any(list(driven(store, 3, rounds=100)))  # which compares what pages hold
    usage = store.usage()
    assert usage.not_swapped > 2, calls
    assert calls > 6 * usage.not_swapped / 2  # others were copied
    assert races.found == [] or not streamed


def test_page_locked_memory_counts_as_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks whose sizes are powers of two."""
    store = store_on(PageSwap(), None, monkeypatch)
    (sequence,) = filled(store, [12])
    layers = store.groups[None].pools.layers
    pool = 3 * PAGE * 2 * 3 * 8
    assert PageSwap().host_bytes(3, layers) == 2 * LAYERS * pool == 2 * LAYERS * 576
    streamed = StreamedSwap(DEVICE, Streams(), pinned=False)
    assert streamed.host_bytes(3, layers) == 2 * LAYERS * 1024
    assert streamed.host_bytes(0, layers) == 0
    saved = PageSwap().out(store.groups[None].tables[sequence.id].pages, layers)
    assert sum(t.nbytes for pair in saved.values() for t in pair) == 2 * LAYERS * pool
