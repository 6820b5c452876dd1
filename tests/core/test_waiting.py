"""Who waits: the queue says what sorting says, and a step looks only at those that it lets in."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jackfield
from jackfield.contracts import Schedule, Sequence, Settings
from jackfield.engine.checked_schedule import CheckedSchedule
from jackfield.engine.engine import Engine
from jackfield.engine.waiting import SLACK, SequenceHeap, WaitingQueue
from jackfield.errors import PluginError
from jackfield_plugins.scheduler.fifo import FifoSchedule

SIZE = 600


class Compared(float):
    """A number that counts how often numbers are compared."""

    times = 0

    def __lt__(self, other: float) -> bool:
        Compared.times += 1
        return float.__lt__(self, other)


class Counting(FifoSchedule):
    """The shortest first; counts how often it is asked."""

    def __init__(self, patience: float = 1e6) -> None:
        super().__init__(patience)
        self.asked = 0

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        self.asked += 1
        return (-sequence.settings.priority, len(sequence.tokens))


def made(number: int, length: int = 1, arrival: float = 0.0, priority: int = 0) -> Sequence:
    sequence = Sequence(number, [0] * length, Settings(max_new_tokens=8, priority=priority))
    sequence.arrival = arrival
    return sequence


acts = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 6), st.integers(-1, 1)),
    st.tuples(st.just("discard"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("take"), st.just(0), st.just(0)),
    st.tuples(st.just("again"), st.integers(0, 30), st.integers(1, 9)),
    st.tuples(st.just("wait"), st.integers(1, 40), st.just(0)),
)


@given(st.lists(acts, max_size=60), st.sampled_from([5.0, 40.0, 1e6]))
@settings(max_examples=300, deadline=None)
def test_the_queue_is_a_sorted_list(done: list[tuple[str, int, int]], patience: float) -> None:
    schedule = Counting(patience)
    queue: WaitingQueue[Sequence] = WaitingQueue(schedule)
    waiting: dict[int, tuple[Any, Sequence]] = {}
    left: list[Sequence] = []
    now, numbers = 0.0, itertools.count()

    def enter(sequence: Sequence) -> None:
        queue.add(sequence)
        waiting[sequence.id] = (FifoLike.key(sequence), sequence)

    for what, number, more in done:
        if what == "add":
            enter(made(next(numbers), number, now, more))
        elif what == "discard" and waiting:
            _, sequence = waiting.pop(sorted(waiting)[number % len(waiting)])
            queue.discard(sequence)
            queue.discard(sequence)
            left.append(sequence)
        elif what == "again" and left:  # preempted, and longer
            sequence = left.pop(number % len(left))
            for _ in range(more):
                list.append(sequence.tokens, 0)
            enter(sequence)
        elif what == "wait":
            now += number
        elif what == "take":
            queue.rank()
            late = [s for _, s in waiting.values() if now - s.arrival >= patience]
            expected = (
                min(late, key=lambda s: (s.arrival, s.id)) if late
                else min(waiting.values(), key=lambda p: (p[0], p[1].id), default=(0, None))[1]
            )  # fmt: skip
            assert queue.first(now) is expected
            if expected is not None:
                queue.discard(expected)
                left.append(expected)
                del waiting[expected.id]
        assert len(queue) == len(waiting)
        assert {s.id for s in queue} == set(waiting)
        assert len(queue._by_key._entries) <= SLACK + 2 * len(waiting) + 1


FifoLike = Counting()


def test_who_was_put_aside_comes_back_with_its_leader_and_not_before() -> None:
    queue: WaitingQueue[Sequence] = WaitingQueue(FifoSchedule(1e6))
    leader = made(0)
    followers = [made(n) for n in (1, 2, 3)]
    for follower in followers:
        follower.leader = leader
        queue.add(follower)
    queue.rank()
    for _ in followers:
        first = queue.first(0.0)
        assert first is not None
        queue.put_aside(first)
    assert queue.first(0.0) is None
    assert (len(queue), queue.leaders) == (3, True)
    queue.discard(followers[1])
    queue.call_back(leader)
    queue.rank()
    assert (len(queue), queue.leaders) == (2, False)
    assert queue.first(0.0) is followers[0]
    queue.clear()
    assert (len(queue), queue.first(0.0)) == (0, None)


def test_who_is_passed_over_has_its_place_again_with_the_key_that_it_had() -> None:
    class Asked(FifoSchedule):
        times = 0

        def key(self, sequence: Sequence) -> tuple[float, ...]:
            Asked.times += 1
            return (float(sequence.id * Asked.times),)

    queue: WaitingQueue[Sequence] = WaitingQueue(Asked(1e6))
    one, other = made(1), made(2)
    queue.add(one)
    queue.add(other)
    for _ in range(3):
        queue.rank()
        assert queue.first(0.0) is one
        queue.pass_over(one)
        assert queue.first(0.0) is other
    assert Asked.times == 2
    queue.discard(one)
    queue.rank()
    assert (list(queue), queue.leaders, queue.first(0.0)) == ([other], False, other)
    queue.add(one)  # preempted, say: it comes anew
    queue.rank()
    assert Asked.times == 3


def test_a_heap_costs_its_depth_and_keeps_no_sequence() -> None:
    heap: SequenceHeap[Sequence] = SequenceHeap()
    numbers = random.Random(3)
    known = [made(n) for n in range(SIZE)]
    for sequence in known:
        heap.push(sequence, Compared(numbers.random()))
    for times in range(SIZE // 2):
        Compared.times = 0
        first = heap.first()
        assert first is not None
        heap.discard(first if times % 2 else known[-1 - times])
        heap.first()
        assert Compared.times <= 60 or len(heap._entries) == len(heap)  # mended, once in a while
    assert all(entry[2:] and not isinstance(entry[2], Sequence) for entry in heap._entries)


@pytest.fixture
def engine() -> Any:
    with jackfield.load("demo", max_batch_size=1, cache_implementation="paged") as loaded:
        yield loaded


def crowd(engine: Engine, schedule: Schedule, size: int = SIZE, **asked: Any) -> list[Any]:
    """So many wait behind one that runs; the schedule knows them all."""
    loop = engine._loop
    loop.scheduler = CheckedSchedule(schedule, "counted")
    loop.waiting = WaitingQueue(loop.scheduler)
    found = [
        engine._intake.sequence([5, 6, 7], {"max_new_tokens": 2, **asked}, streams=False)
        for _ in range(size)
    ]
    for sequence in found:
        loop.submit(sequence)
    loop.step()
    return found


def test_a_scheduler_is_asked_once_for_each_that_waits(engine: Engine) -> None:
    schedule = Counting()
    found = crowd(engine, schedule)
    assert schedule.asked == SIZE
    loop = engine._loop
    for _ in range(40):
        loop.step()
    assert schedule.asked == SIZE
    assert len(loop.waiting) < SIZE - 10
    loop._preempt(loop.running[0])
    loop.step()
    assert schedule.asked == SIZE + 1
    assert [s.id for s in found if s.finish_reason] == [s.id for s in found[:20]]


def test_a_step_looks_at_those_that_it_lets_in(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparisons, and looks at a deadline, in steps of a crowd: as many as the heap is deep."""

    class Costly(Counting):
        def key(self, sequence: Sequence) -> tuple[float, ...]:
            return (Compared(sequence.id % 97),)

    monkeypatch.setattr("jackfield.engine.checked_schedule._NUMBERS", {Compared, int, float})
    looked = []
    kind = type(engine._intake.sequence([5], {"max_new_tokens": 1}))
    deadline = kind.deadline.fget  # type: ignore[attr-defined]
    crowd(engine, Costly(), deadline=1e6)
    monkeypatch.setattr(kind, "deadline", property(lambda s: (looked.append(s), deadline(s))[1]))
    Compared.times, before = 0, len(engine._loop.waiting)
    steps = 40
    for _ in range(steps):
        engine._loop.step()
    entered = before - len(engine._loop.waiting)
    assert entered >= 10
    assert Compared.times <= 60 * entered
    assert len(looked) <= 2 * steps


def test_patience_lets_the_eldest_in_whatever_the_keys_are(engine: Engine) -> None:
    """The newest first, for ever: a policy that starves nobody all the same."""

    class NewestFirst(FifoSchedule):
        def key(self, sequence: Sequence) -> tuple[float, ...]:
            return (-sequence.id,)

    loop = engine._loop
    found = crowd(engine, NewestFirst(100.0), 20)
    assert found[-1].num_cached
    eldest = found[0]
    for _ in range(6):
        loop.step()
    assert not eldest.num_cached
    for sequence in loop.waiting:
        sequence.arrival -= 200
    late: list[Any] = []
    while loop.waiting:
        loop.step()
        late += [s for s in found if s.finish_reason and s not in late]
    assert [s.id for s in late[-10:]] == sorted(s.id for s in late[-10:])


def test_cancelling_one_that_waits_looks_at_no_other(engine: Engine) -> None:
    found = crowd(engine, Counting(), deadline=1e6)
    loop = engine._loop
    for sequence in found[1 : SIZE // 2]:
        (event,) = loop.cancel(sequence)
        assert event.sequence is sequence
    assert len(loop.waiting) == SIZE - SIZE // 2
    assert len(loop._timed) == SIZE - SIZE // 2 + 1
    for _ in range(10):
        loop.step()
    assert all(s.finish_reason == "cancelled" for s in found[1 : SIZE // 2])
    assert [s.finish_reason for s in found[SIZE // 2 : SIZE // 2 + 3]] == ["stop"] * 3
    loop.reset()
    assert len(loop.waiting) == len(loop._timed) == 0


@pytest.mark.parametrize("patience", [0, -1.0, float("inf"), float("nan"), None, "10 s", True])
def test_patience_that_is_no_time_is_the_schedulers_fault(patience: Any) -> None:
    schedule = FifoSchedule(1.0)
    schedule.patience = patience
    if patience is True:  # one second
        assert CheckedSchedule(schedule, "odd").patience == 1
        return
    with pytest.raises(PluginError, match=r"^odd: patience must be a number of seconds above 0"):
        CheckedSchedule(schedule, "odd")
