"""Schedulers: the budget is exact, decode never waits, nobody starves; outside ones are checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

import pytest
from driven import Arrival, drive, recorded, tokens
from families import build, oracle, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

import jackfield
from jackfield.contracts import Schedule, Sequence, Settings, Step
from jackfield.engine.loop import Loop
from jackfield.errors import OptionError, PluginError
from jackfield_plugins.scheduler.fifo import FifoSchedule
from jackfield_plugins.scheduler.short_first import ShortFirstSchedule

SCHEDULES: dict[str, Callable[[float], FifoSchedule]] = {
    "fifo": FifoSchedule,
    "short-first": ShortFirstSchedule,
}
model_of = functools.cache(build)
plain = functools.cache(build)  # runs in no engine


def made(number: int, length: int = 1, priority: int = 0, arrival: int = 0) -> Sequence:
    settings = Settings(max_new_tokens=8, priority=priority)
    found = Sequence(number, [0] * length, settings)
    found.arrival = arrival
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_priorities_first_then_what_the_name_says(name: str) -> None:
    waiting = [made(0, 9), made(1, 3), made(2, 5, priority=1), made(3, 2, priority=-1), made(4, 1)]
    found = sorted(waiting, key=SCHEDULES[name](100).key)
    expected = {"fifo": [2, 0, 1, 4, 3], "short-first": [2, 4, 1, 0, 3]}[name]
    assert [sequence.id for sequence in found] == expected


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(-1, 1), st.integers(0, 9)), min_size=1,
                  max_size=12),
    spare=st.integers(0, 40),
    patience=st.sampled_from([1, 5, 100]),
    name=st.sampled_from(sorted(SCHEDULES)),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_schedule_spends_the_budget_and_not_more(
    rows: list[tuple[int, int, int]], spare: int, patience: int, name: str
) -> None:
    running = [made(i, n, priority, at) for i, (n, priority, at) in enumerate(rows)]
    pending = [n for n, _, _ in rows]
    budget = len(rows) + spare
    found = SCHEDULES[name](patience).schedule(running, pending, budget, 10)
    assert all(0 <= n <= p for n, p in zip(found, pending, strict=True))
    assert sum(found) == min(budget, sum(pending))
    assert all(n == 1 for n, p in zip(found, pending, strict=True) if p == 1)
    cut = [n for n, p in zip(found, pending, strict=True) if 0 < n < p]
    assert len(cut) <= {"fifo": 2, "short-first": 1}[name]  # not a bit of each


def test_short_first_shares_a_step_by_what_is_left() -> None:
    running, pending = [made(0, 20), made(1, 6), made(2, 1), made(3, 9)], [20, 6, 1, 9]
    schedule = ShortFirstSchedule(100)
    assert schedule.schedule(running, pending, 12, 0) == [0, 6, 1, 5]
    running[0].arrival = -200.0
    assert schedule.schedule(running, pending, 12, 0) == [11, 0, 1, 0]


def test_fifo_shares_a_step_between_the_first_and_the_shortest() -> None:
    running, pending = [made(0, 80), made(1, 30), made(2, 1), made(3, 20)], [80, 30, 1, 20]
    schedule = FifoSchedule(100)
    assert schedule.schedule(running, pending, 41, 0) == [5, 15, 1, 20]
    assert schedule.schedule(running, pending, 81, 0) == [30, 30, 1, 20]
    assert schedule.schedule(running, pending, 3, 0) == [1, 0, 1, 1]
    assert schedule.schedule(running, pending, 2, 0) == [1, 0, 1, 0]
    assert schedule.schedule(running[:1], pending[:1], 12, 0) == [12]
    assert schedule.schedule(running, [3, 30, 1, 20], 41, 0) == [3, 17, 1, 20]
    running[0].arrival = -200.0
    assert schedule.schedule(running, pending, 41, 0) == [20, 0, 1, 20]
    running[0].arrival = 0.0
    running[1].settings = Settings(max_new_tokens=8, priority=1)
    assert schedule.schedule(running, pending, 41, 0) == [0, 30, 1, 10]
    assert FifoSchedule(100, shares=False).schedule(running[:2], [80, 5], 8, 0) == [3, 5]


@pytest.mark.parametrize(("patience", "part"), [(1e9, 8), (1.0, 2)])
@given(lengths=st.lists(st.integers(2, 300), min_size=2, max_size=9), spare=st.integers(2, 64))
@settings(max_examples=60, deadline=None)
def test_whoever_comes_who_came_first_has_a_part_of_every_step(
    patience: float, part: int, lengths: list[int], spare: int
) -> None:
    """While shorter prompts come in every step, without an end."""
    running = [made(n, length) for n, length in enumerate(lengths)]
    schedule, steps, before = FifoSchedule(patience), 0, 0
    for number, first in enumerate(running):
        before += lengths[number]
        while first.num_cached < len(first.tokens):
            left = [s for s in running if s.num_cached < len(s.tokens)]
            left += [made(1000 + 9 * steps + n, 2, arrival=10) for n in range(40)]
            pending = [len(s.tokens) - s.num_cached for s in left]
            found = schedule.schedule(left, pending, spare + pending.count(1), 10.0)
            assert sum(found) == spare + pending.count(1)
            for sequence, count in zip(left, found, strict=True):
                sequence.num_cached += count
            steps += 1
        assert steps <= before // -(-spare // part) + number + 1


Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, list[Step]]]]:
    """An engine on pages, and the steps that it takes."""
    engines: list[jackfield.Engine] = []

    def make(scheduler: str, **more: Any) -> tuple[Any, list[Step]]:
        engine = jackfield.load(
            model_of("llama"),
            cache_implementation="paged?page_size=4&prefix_sharing=False",
            scheduler=scheduler,
            **more,
        )
        engines.append(engine)
        return engine, recorded(engine._loop.cache, monkeypatch)

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_engine_keeps_the_budget_and_decode_never_waits(
    load: Load, name: str, chunk: int | None
) -> None:
    budget = 9
    engine, steps = load(name, max_batch_size=6, max_batch_tokens=budget, prefill_chunk_size=chunk)
    texts = prompts((3, 30, 7, 1, 22, 14, 40, 2, 5, 11))
    counts: list[list[int]] = []

    def look(loop: Loop) -> None:
        counts.append([item.num_tokens for item in steps[-1].scheduled])

    found = drive(
        engine, [Arrival(2 * n, t, max_new_tokens=12) for n, t in enumerate(texts)], after=look
    )
    assert tokens(found) == [oracle(plain("llama"), t, 12) for t in texts]
    assert max(map(sum, counts)) == budget
    assert all(n <= (chunk or budget) for step in counts for n in step)
    for (sequence,) in found:  # from its first token on, one in every step until it has ended
        at = [i for i, s in enumerate(steps) if sequence.id in {f.sequence.id for f in s.scheduled}]
        assert at[-12:] == list(range(at[-1] - 11, at[-1] + 1))
    mixed = [
        step for step in steps
        if any(f.start + f.num_tokens < f.sequence.prompt_length for f in step.scheduled)
        and any(f.start >= f.sequence.prompt_length for f in step.scheduled)
    ]  # fmt: skip
    assert mixed  # a piece of a prompt beside tokens that decode


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("length", "priority"), [(40, 0), (3, -1), (40, -1)])
def test_nobody_starves_under_an_endless_stream_of_others(
    load: Load, name: str, length: int, priority: int
) -> None:
    """More come than can run, each of them preferred: the queue grows, and all are overdue."""
    patience = 20
    engine, _ = load(f"{name}?patience={patience}", max_batch_size=2, max_batch_tokens=8)
    loop = engine._loop
    loop.clock = lambda: float(loop.steps)  # each takes a second
    favoured = [[5], [7]]

    def submit(text: list[int], **asked: Any) -> Sequence:
        sequence = engine._intake.sequence(text, {"max_new_tokens": 3, **asked}, streams=False)
        loop.submit(sequence)
        return sequence

    submit(favoured[0], priority=1)
    (text,) = prompts((length,))
    patient = submit(text, priority=priority)
    for _ in range(patience + 60):
        for prompt in favoured:
            submit(prompt, priority=1)
        for sequence in loop.waiting:  # each step a second
            sequence.arrival -= 1
        loop.step()
        if patient.finish_reason is not None:
            break
    assert patient.new_tokens == oracle(plain("llama"), text, 3)
    assert len(loop.waiting) > patience
    for sequence in [*loop.running, *loop.waiting]:
        loop.cancel(sequence)


def test_short_first_lowers_the_mean_wait_for_the_first_token(load: Load) -> None:
    texts = prompts((60, 50, 2, 3, 55, 4, 2, 48, 3, 5, 2, 58))
    waits = {}
    for name in SCHEDULES:
        engine, steps = load(name, max_batch_size=4, max_batch_tokens=16)
        found = drive(engine, [Arrival(0, text, max_new_tokens=4) for text in texts])
        firsts = [
            next(
                i for i, step in enumerate(steps)
                for item in step.scheduled
                if item.sequence is sequence
                if item.start + item.num_tokens >= sequence.prompt_length
            )
            for (sequence,) in found
        ]  # fmt: skip
        waits[name] = mean(firsts)
        assert tokens(found) == [oracle(plain("llama"), t, 4) for t in texts]
        engine.close()
    assert waits["short-first"] < 0.8 * waits["fifo"], waits


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_they_order_batches_of_padded_caches_too(name: str, cache: str) -> None:
    texts = prompts((9, 3, 5, 1))
    with jackfield.load(
        model_of("llama"), cache_implementation=cache, scheduler=name, max_batch_size=2
    ) as engine:
        found = drive(engine, [Arrival(0, text, max_new_tokens=3) for text in texts])
        assert engine.report()["scheduler"].name == name
    assert tokens(found) == [oracle(plain("llama"), text, 3) for text in texts]


@pytest.mark.parametrize("patience", ["0", "-1", "inf", "nan"])
def test_patience_is_seconds_that_pass(patience: str) -> None:
    with pytest.raises(OptionError, match="patience"):
        jackfield.plan(model_of("llama"), scheduler=f"fifo?patience={patience}")


class Outside(Schedule):
    """Does as `fifo`, and then something to it."""

    def __init__(self, key: Callable[..., Any], schedule: Callable[..., Any]) -> None:
        self._inner, self._key, self._schedule = FifoSchedule(100), key, schedule

    def key(self, sequence: Any) -> Any:
        return self._key(self._inner.key(sequence))

    def schedule(self, running: Any, pending: Any, budget: int, now: float) -> Any:
        return self._schedule(self._inner.schedule(running, pending, budget, now), budget)


def same(found: Any, budget: int = 0) -> Any:
    return found


KEYS: dict[str, Callable[..., Any]] = {
    "a list": list,
    "a number": lambda found: found[0],
    "text": lambda found: ("a",),
    "NaN": lambda found: (float("nan"),),
    "None": lambda found: None,
    "an error": lambda found: 1 // 0,
}
SCHEDULED: dict[str, Callable[..., Any]] = {
    "wrong length": lambda found, budget: found[1:],
    "too long": lambda found, budget: [*found, 0],
    "more than uncached": lambda found, budget: [found[0] + 1, *found[1:]],
    "less than nothing": lambda found, budget: [*found[:-1], -1],
    "all zeros": lambda found, budget: [0] * len(found),
    "no whole numbers": lambda found, budget: [n / 2 for n in found],
    "None": lambda found, budget: None,
    "Nones": lambda found, budget: [None] * len(found),
    "an error": lambda found, budget: 1 // 0,
}


@pytest.mark.parametrize(
    ("key", "schedule"),
    [*((key, same) for key in KEYS.values()), *((same, p) for p in SCHEDULED.values())],
    ids=[*(f"key {name}" for name in KEYS), *(f"schedule {name}" for name in SCHEDULED)],
)
@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_a_scheduler_that_returns_nonsense_is_named(
    key: Any, schedule: Any, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = jackfield.plan(model_of("llama"))["scheduler"].backend
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "bind", lambda *_: Outside(key, schedule))
        engine = jackfield.load(model_of("llama"), cache_implementation=cache)
    what = "key" if schedule is same else "schedule"
    with engine, pytest.raises(PluginError, match=rf"^scheduler 'fifo' of jackfield .*: {what} "):
        engine.generate(prompts((4, 5, 6)), max_new_tokens=3)


def test_a_scheduler_that_spends_more_than_the_budget_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = jackfield.plan(model_of("llama"))["scheduler"].backend
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "bind", lambda *_: Outside(same, lambda found, budget: [4, 5]))
        engine = jackfield.load(
            model_of("llama"), cache_implementation="paged", max_batch_size=2, max_batch_tokens=8
        )
    with engine, pytest.raises(PluginError, match=r"1 to 8 in sum; got \[4, 5\]"):
        engine.generate(prompts((4, 5)), max_new_tokens=3)


def test_a_scheduler_that_cuts_prompts_is_named_where_pieces_must_be_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = jackfield.plan(model_of("llama"))["scheduler"].backend
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "bind", lambda *_: Outside(same, lambda found, budget: [2]))
        engine = jackfield.load(model_of("llama"), cache_implementation="paged", deterministic=True)
    with engine, pytest.raises(PluginError, match="gives nobody all of its uncached tokens"):
        engine.generate(prompts((4,)), max_new_tokens=3)
