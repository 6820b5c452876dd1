"""What a step may feed: the target is met under a clock of the test's own, whatever tokens cost."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from driven import recorded
from families import build, oracle, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

import jackfield
from jackfield.contracts import Sequence, Step
from jackfield.engine import loop
from jackfield.engine.token_budget import (
    ALONE,
    FIRST,
    GRAIN,
    LEAST,
    PATIENT,
    UNTIL_KNOWN,
    UNTIL_NONE,
    TokenBudget,
)
from jackfield.errors import UsageError

TARGET, MOST = 0.05, 2048
Cost = Callable[[int, int], float]


def linear(overhead: float, row: float, token: float) -> Cost:
    """Seconds of a step by its rows that decode and its tokens of prompts."""
    return lambda decoding, prompt: overhead + row * decoding + token * prompt


def scheduled(decoding: int, prompt: int) -> Any:
    counts = [1] * decoding + ([prompt] if prompt else [])
    return [SimpleNamespace(num_tokens=n) for n in counts]


def taken(
    budget: TokenBudget, decoding: int, cost: Cost, wanted: int = 1 << 20
) -> tuple[int, float]:
    """Take one step with a prompt that wants so many tokens: how many it got, and its seconds."""
    got = min(wanted, budget.tokens(decoding) - decoding)
    seconds = cost(decoding, got)
    budget.count(scheduled(decoding, got), seconds, waited=True)
    return got, seconds


def decoded(budget: TokenBudget, decoding: int, cost: Cost, steps: int = 20) -> float:
    for _ in range(steps):
        taken(budget, decoding, cost, 0)
    return cost(decoding, 0)


@given(
    decoding=st.integers(1, 32),
    overhead=st.floats(1e-4, 0.02),
    token=st.floats(1e-6, 1e-2),
    before=st.lists(st.integers(2, 3000), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_steps_beside_streams_come_to_the_target(
    decoding: int, overhead: float, token: float, before: list[int]
) -> None:
    """Whatever prompts were read before, alone; never more than twice what was tried."""
    budget, cost = TokenBudget(TARGET, MOST), linear(overhead, 1e-4, token)
    for wanted in before:
        taken(budget, 0, cost, wanted)
    decoded(budget, decoding, cost)
    last = 0.0
    for _ in range(30):
        got, last = taken(budget, decoding, cost)
        assert LEAST <= got <= MOST - decoding
    grain = GRAIN * token
    assert last <= max(TARGET * 1.02, cost(decoding, LEAST) * 1.001)
    assert last >= min(TARGET - grain - 1e-9, cost(decoding, MOST - decoding)) * 0.98


def test_the_first_step_tries_few_and_the_next_at_most_twice_as_many() -> None:
    budget, free = TokenBudget(TARGET, MOST), linear(1e-3, 0.0, 0.0)
    assert [taken(budget, 1, free)[0] for _ in range(6)] == [128, 256, 512, 1024, 2047, 2047]
    assert FIRST == 128


@pytest.mark.parametrize("decoding", [1, 8, 32])
def test_prompts_always_get_on(decoding: int) -> None:
    """Where a token costs more than the target there is a floor, and `max_batch_tokens` holds."""
    slow = linear(0.0, 0.0, 1.0)
    budget = TokenBudget(TARGET, MOST)
    assert [taken(budget, decoding, slow)[0] for _ in range(4)] == [128, LEAST, LEAST, LEAST]
    tight = TokenBudget(TARGET, decoding + 3)
    assert [taken(tight, decoding, slow)[0] for _ in range(3)] == [3, 3, 3]
    assert [taken(TokenBudget(TARGET, MOST, 500), decoding, slow)[0] for _ in range(3)] == [500] * 3


def test_where_decoding_is_slow_prompts_get_as_long_as_it_takes() -> None:
    budget, cost = TokenBudget(TARGET, MOST), linear(0.4, 0.0, 1e-3)
    alone = decoded(budget, 4, cost)
    for _ in range(12):
        _, seconds = taken(budget, 4, cost)
    assert seconds == pytest.approx(2 * alone, rel=0.1)


@given(
    overhead=st.floats(0.0, 0.08), token=st.floats(5e-4, 2e-3), noise=st.sampled_from([0.0, 0.1])
)
def test_what_any_prompt_costs_leaves_its_tokens_as_long_as_decoding_takes(
    overhead: float, token: float, noise: float
) -> None:
    """A mixed step may run uncompiled: that is no reason to take many of them, with few tokens."""
    budget, random, base = TokenBudget(TARGET, MOST), Random(0), 0.06

    def cost(decoding: int, prompt: int) -> float:
        beside = base if decoding else 0.0
        seconds = beside + (overhead if prompt else 0.0) + token * prompt
        return seconds * (1 + noise * random.random())

    decoded(budget, 8, cost)
    for wanted in (MOST, 40, 90, 64, 33, MOST, MOST, MOST) * 5:
        taken(budget, 8, cost, wanted)
    got, seconds = taken(budget, 8, cost)
    slack = 0.6 * base if noise else 0.02 * base
    assert seconds <= max(2 * base + overhead, base + overhead + LEAST * token) + slack
    assert got >= (base - slack - 0.1 * overhead) / token - GRAIN


@pytest.mark.parametrize("overhead", [0.0, 0.01, 0.03])
@pytest.mark.parametrize(("base", "worst"), [(0.026, 4.8), (0.06, 3.2)])
def test_beside_a_long_prompt_no_step_takes_many_times_as_long(
    overhead: float, base: float, worst: float
) -> None:
    """Its tokens cost seven times as much at the end; `worst` times and the overhead."""
    budget, read = TokenBudget(TARGET, MOST), 0
    for _ in range(8):
        taken(budget, 0, linear(0.02, 0.0, 6e-4), 40)
    decoded(budget, 8, linear(base, 0.0, 0.0))
    while read < 8192:
        cost = linear(base + overhead, 0.0, 6e-4 + 3.4e-3 * read / 8192)
        got, seconds = taken(budget, 8, cost, 8192 - read)
        read += got
        assert seconds <= worst * base + overhead


def test_what_decoding_takes_is_known_by_how_many_decode() -> None:
    cost, budget = linear(0.0, 0.01, 1e-3), TokenBudget(TARGET, MOST)
    decoded(budget, 1, cost)
    decoded(budget, 16, cost)
    for _ in range(12):
        taken(budget, 16, cost)
    assert budget.tokens(1) - 1 < 50
    assert budget.tokens(16) - 16 > 100


def test_where_steps_are_slow_one_in_a_while_has_no_prompts() -> None:
    """So what decoding takes is known again, of more and of fewer, where prompts never end."""
    budget, cost = TokenBudget(TARGET, MOST), linear(0.0, 0.01, 1e-3)
    decoded(budget, 4, cost)
    got = [taken(budget, 16, cost)[0] for _ in range(3 * UNTIL_NONE)]
    assert [at for at, tokens in enumerate(got) if not tokens] == [4, 37, 70]
    assert got[UNTIL_KNOWN - 1] < 0.5 * got[-1]
    quick = [taken(budget, 1, linear(0.01, 0.0, 1e-4))[0] for _ in range(3 * UNTIL_NONE)]
    assert quick.count(0) <= 1  # due from before


def test_prompts_grow_no_faster_than_twice_where_decoding_is_slow() -> None:
    budget, cost = TokenBudget(TARGET, MOST), linear(0.06, 0.0, 1e-4)
    decoded(budget, 8, cost)
    mixed = linear(0.12, 0.0, 1e-4)
    got = [taken(budget, 8, mixed, wanted)[0] for wanted in (128, 64, 24, 30, MOST, MOST)]
    assert all(after <= max(2 * before, LEAST) for before, after in itertools.pairwise(got[3:]))


@pytest.mark.parametrize(
    ("reading", "crowded", "share"),
    [(1, False, 1), (4, False, 1), (8, False, 2), (100, False, 3), (8, True, 1)],
)
def test_many_that_read_get_more_time_than_few_that_decode(
    reading: int, crowded: bool, share: int
) -> None:
    budget, cost = TokenBudget(TARGET, MOST), linear(0.03, 0.01, 1e-3)
    alone = decoded(budget, 4, cost)
    for _ in range(20):
        got = budget.tokens(4, reading, crowded=crowded) - 4
        budget.count(scheduled(4, got), cost(4, got), waited=True)
    assert GRAIN >= share * alone / 1e-3 - got >= 0


@pytest.mark.parametrize("reading", [0, 1, 31, 1000])
def test_the_target_holds_where_decoding_is_quick_whoever_reads(reading: int) -> None:
    budget, cost = TokenBudget(TARGET, MOST), linear(0.01, 0.001, 2e-4)
    decoded(budget, 4, cost)
    for step in range(20):
        got = budget.tokens(4, reading) - 4
        budget.count(scheduled(4, got), cost(4, got), waited=True)
        assert step == 0 or cost(4, got) <= TARGET + 1e-9


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize(("decoding", "alone", "mixed"), [(1, 0.3, 0.09), (3, 0.0051, 0.0049)])
def test_prompts_that_seem_to_cost_nothing(
    decoding: int, alone: float, mixed: float, crowded: bool
) -> None:
    budget = TokenBudget(TARGET, MOST)
    for _ in range(3):
        budget.count(scheduled(decoding, 0), alone, waited=True)
    for _ in range(3):
        budget.count(scheduled(decoding, 40), mixed, waited=True)
        assert budget.tokens(decoding, crowded=crowded) >= decoding + LEAST


@given(st.data())
def test_whatever_steps_took_there_is_a_budget(data: st.DataObject) -> None:
    """A clock may stand still or jump; no step in a row of two is without prompts."""
    most = data.draw(st.integers(1, 4096))
    budget, nobody = TokenBudget(data.draw(st.sampled_from([1e-9, TARGET, 1e9])), most), 0
    seconds = st.sampled_from([0.0, 1e-9, 0.01, 0.06, 3.0])
    for _ in range(data.draw(st.integers(1, 120))):
        decoding = data.draw(st.integers(0, 40))
        reading = data.draw(st.integers(0, 40))
        found = budget.tokens(decoding, reading, crowded=data.draw(st.booleans()))
        assert min(most, decoding) <= found <= most
        assert found or not decoding
        nobody = nobody + 1 if found <= decoding < most else 0
        assert nobody <= 1
        prompt = max(0, found - decoding)
        waited = data.draw(st.booleans())
        if prompt != 1 and decoding + prompt:
            budget.count(scheduled(decoding, prompt), data.draw(seconds), waited=waited)
            nobody = nobody if waited else 0


def test_alone_prompts_get_a_few_times_the_target() -> None:
    budget, cost = TokenBudget(TARGET, MOST), linear(0.002, 0.0, 2e-4)
    for _ in range(12):
        got, seconds = taken(budget, 0, cost)
    assert got > ALONE
    assert seconds == pytest.approx(PATIENT * TARGET, rel=0.1)
    slow = linear(0.0, 0.0, 0.01)
    assert {taken(budget, 0, slow)[0] for _ in range(30)} >= {ALONE}
    assert taken(budget, 0, slow)[0] == ALONE


def test_what_costs_more_and_more_is_followed() -> None:
    """The tokens of a long prompt attend to more and more keys."""
    budget, worst, read = TokenBudget(TARGET, MOST), 0.0, 0
    decoded(budget, 8, linear(0.02, 0.0, 0.0))
    while read < 16_000:
        got, seconds = taken(budget, 8, linear(0.02, 0.0, 1e-4 * (1 + read / 4000)))
        read += got
        worst = max(worst, seconds)
    assert worst < 1.3 * TARGET


def test_one_slow_step_is_not_the_prompts_doing() -> None:
    budget, cost = TokenBudget(TARGET, MOST), linear(0.01, 0.0, 1e-4)
    decoded(budget, 8, cost)
    for _ in range(10):
        usual, _ = taken(budget, 8, cost)
    taken(budget, 8, lambda *_: 30.0)
    got = [taken(budget, 8, cost)[0] for _ in range(12)]
    assert min(got) > usual / 3
    assert got[-1] > 0.9 * usual
    budget.count(scheduled(8, 0), 30.0, waited=True)
    assert [taken(budget, 8, cost)[0] for _ in range(40)][-1] > 0.9 * usual


@pytest.mark.parametrize("first", [0.4, 2.0, 20.0])
def test_a_first_decode_step_that_makes_graphs_is_not_what_decoding_costs(first: float) -> None:
    """Prompts may then come without a gap, and no step is without them."""
    budget, cost = TokenBudget(TARGET, MOST), linear(0.01, 0.0, 1e-3)
    taken(budget, 0, cost, 128)
    taken(budget, 1, lambda *_: first, 0)
    steps = [taken(budget, 1, cost, wanted)[1] for wanted in (MOST, MOST, MOST, 30) * 3]
    assert max(steps) <= 5 * TARGET
    assert max(steps[4:]) <= 2 * TARGET


def test_many_tiny_prompts_say_nothing_about_long_ones() -> None:
    """A prompt of few tokens is lost in a step's overhead, or looks as if it cost all of it."""
    budget, cost = TokenBudget(TARGET, MOST), linear(0.01, 0.0, 1e-3)
    decoded(budget, 8, cost)
    for _ in range(10):
        usual, _ = taken(budget, 8, cost)
    for wanted in (2, 3, 5, 9) * 50:
        taken(budget, 8, linear(0.008, 0.0, 0.0), wanted)
    assert budget.tokens(8) - 8 == pytest.approx(usual, abs=GRAIN)


def test_steps_that_nobody_waits_for_count_with_the_next_that_is() -> None:
    """A device works through what it was given; only who reads of it knows how long it took."""
    budget, cost = TokenBudget(TARGET, MOST), linear(0.0, 0.0, 1e-4)
    decoded(budget, 1, linear(0.001, 0.0, 0.0))
    queued = 0.0
    for _ in range(40):
        for _ in range(3):
            got = budget.tokens(0)
            budget.count(scheduled(0, got), 1e-4, waited=False)
            queued += cost(0, got)
        got = budget.tokens(1) - 1
        budget.count(scheduled(1, got), queued + cost(1, got), waited=True)
        queued = 0.0
    assert 0.9 * TARGET <= cost(1, budget.tokens(1) - 1) <= TARGET


@functools.cache
def model_of(use: str) -> Any:
    """A small Llama with a context of 1,024, once for each `use`."""
    model = build("llama")
    model.config.max_position_embeddings = 1024
    return model


class Clocked:
    """An engine whose clock is the cost of its steps, taken by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Cost, **options: Any) -> None:
        self.engine = jackfield.load(
            model_of("engine"),
            cache_implementation="paged?page_size=4&prefix_sharing=False",
            **{"max_batch_size": 8, **options},
        )
        self.loop = self.engine._loop
        self.now = 0.0
        self.loop.clock = lambda: self.now
        self.steps: list[Step] = recorded(self.loop.cache, monkeypatch)
        inner = self.loop.forward

        def forward(inputs: Any) -> Any:
            counts = [item.num_tokens for item in self.steps[-1].scheduled]
            self.now += cost(counts.count(1), sum(n for n in counts if n > 1))
            return inner(inputs)

        self.loop.forward = forward

    def submit(self, text: list[int], new: int, *, streams: bool = True) -> Sequence:
        asked = {"max_new_tokens": new}
        sequence = self.engine._intake.sequence(text, asked, streams=streams)
        self.loop.submit(sequence)
        return sequence

    def run(self, steps: int = 10_000) -> list[tuple[int, list[int], float]]:
        """Rows that decode, tokens of prompts, and seconds of each step from now on."""
        found = []
        while steps and (self.loop.running or self.loop.waiting):
            steps -= 1
            before = self.now
            self.loop.step()
            counts = [item.num_tokens for item in self.steps[-1].scheduled]
            found.append((counts.count(1), [n for n in counts if n > 1], self.now - before))
        return found


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Clocked]]:
    made: list[Clocked] = []

    def make(cost: Cost = linear(0.01, 0.0, 2e-4), **options: Any) -> Clocked:  # noqa: B008
        made.append(Clocked(monkeypatch, cost, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def test_on_a_device_steps_that_choose_tokens_are_measured(
    clocked: Callable[..., Clocked], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, waited = loop._is_waited_for, []

    def elsewhere(step: Any, logits: Any) -> bool:
        waited.append(own(step, SimpleNamespace(device=SimpleNamespace(type="elsewhere"))))  # type: ignore[arg-type]
        return waited[-1]

    monkeypatch.setattr(loop, "_is_waited_for", elsewhere)
    run = clocked(linear(0.01, 0.0, 2e-4), target_step_seconds=0.03)
    run.submit(prompts((5,))[0], 40)
    run.run(10)
    run.submit(prompts((400,))[0], 3)
    steps = run.run()
    assert all(waited)  # somebody decodes in each
    assert sorted(seconds for _, _, seconds in steps)[-2] <= 0.03 + 1e-9


@pytest.mark.parametrize("given", [2, 23])
def test_who_gives_the_step_without_prompts_to_a_prompt_is_asked_once(given: int) -> None:
    """A scheduler may put prompts first; few tokens of one measure nothing."""
    budget, cost = TokenBudget(TARGET, MOST), linear(0.06, 0.0, 1e-3)
    decoded(budget, 4, cost)
    for _ in range(UNTIL_NONE):
        taken(budget, 4, cost)
    assert budget.tokens(4) == 4
    budget.count(scheduled(2, given), 0.06, waited=True)
    assert budget.tokens(4) >= 4 + LEAST


@pytest.mark.parametrize(("first", "then"), [(1, 2), (32, 1)])
def test_a_first_step_that_made_graphs_is_forgotten_by_other_sizes_too(
    first: int, then: int
) -> None:
    budget, cost = TokenBudget(TARGET, MOST), linear(0.01, 0.0, 1e-3)
    taken(budget, first, lambda *_: 20.0, 0)
    steps = [taken(budget, then, cost)[1] for _ in range(20)]
    assert max(steps[6:]) <= 2 * TARGET


def test_streams_wait_no_longer_than_the_target_for_prompts(
    clocked: Callable[..., Clocked],
) -> None:
    run = clocked(target_step_seconds=0.03)
    (short, *long) = prompts((5, 400, 300, 250))
    streams = [run.submit(short, 60) for _ in range(3)]
    run.run(10)
    later = [run.submit(text, 3) for text in long]
    steps = run.run()
    assert max(seconds for _, _, seconds in steps) <= 0.03 + 128 * 2e-4  # the first one tries
    assert sorted(seconds for _, _, seconds in steps)[-2] <= 0.03 + 1e-9
    assert all(decoding >= 3 for decoding, _, _ in steps[:40])  # who decodes goes first
    assert any(len(pieces) == 2 for _, pieces, _ in steps)
    for sequence, text in zip([*streams, *later], [short] * 3 + long, strict=True):
        new = sequence.num_new
        assert sequence.new_tokens == oracle(model_of("oracle"), text, new)


def test_while_others_wait_for_a_place_prompts_take_no_longer_than_decoding(
    clocked: Callable[..., Clocked],
) -> None:
    """Places are free when texts end; where most of those that run read prompts, these count."""
    step, token = 0.005, 2e-4
    run = clocked(linear(step, 0.0, token), target_step_seconds=0.02, max_batch_size=4)
    short, long = prompts((5,))[0], prompts((900,))[0]
    streams = [run.submit(short, 100) for _ in range(3)]
    run.run(10)
    run.submit(long, 2)
    alone = [seconds for _, _, seconds in run.run(5)]
    assert min(alone[2:]) > 0.016  # the first ones try
    waiting = [run.submit(short, 2) for _ in range(5)]
    crowded = [seconds for _, _, seconds in run.run(4)]
    assert max(crowded) <= 2 * step + 1e-9
    for sequence in [*streams[:2], *waiting]:
        run.loop.cancel(sequence)
    for text in (long, long, short):
        run.submit(text, 2)
    steps = run.run(4)
    assert [decoding for decoding, _, _ in steps] == [1] * 4
    assert steps[-1][2] > 0.016


def test_who_waits_for_a_prompt_to_be_read_does_not_slow_it(
    clocked: Callable[..., Clocked],
) -> None:
    """Samples of one prompt wait for it, not for a place."""
    run = clocked(linear(0.005, 0.0, 2e-4), target_step_seconds=0.02)
    for _ in range(3):
        run.submit(prompts((5,))[0], 100)
    run.run(10)
    asked = {"max_new_tokens": 2, "num_return_sequences": 3, "do_sample": True}
    for sequence in run.engine._intake.sequences(prompts((900,))[0], asked, streams=True):
        run.loop.submit(sequence)
    steps = run.run(6)
    assert len(run.loop.waiting) == 2
    assert steps[-1][2] > 0.016


@pytest.mark.parametrize("chunk", [48, 100])
def test_chunks_of_several_prompts_do_not_add_up(
    clocked: Callable[..., Clocked], chunk: int
) -> None:
    """A chunk that was named is fed whole, and three of them are no more than one of them is."""
    run = clocked(linear(0.01, 0.0, 1e-2), prefill_chunk_size=chunk)
    stream = run.submit(prompts((5,))[0], 60)
    run.run(10)
    for text in prompts((400, 400, 400)):
        run.submit(text, 2)
    steps = run.run(20)
    sums = [sum(pieces) for _, pieces, _ in steps]
    assert max(sums[1:]) == chunk
    assert all(n <= chunk for _, pieces, _ in steps for n in pieces)
    assert all(decoding >= 1 for decoding, _, _ in steps)
    assert stream.num_new == 30


def test_where_nobody_reads_along_steps_are_as_large_as_they_may_be(
    clocked: Callable[..., Clocked],
) -> None:
    run = clocked(linear(0.01, 0.0, 1.0))
    texts = prompts((400, 300))
    for text in texts:
        run.submit(text, 2, streams=False)
    assert [sum(pieces) for _, pieces, _ in run.run()] == [700, 0]
    run.submit(texts[0], 2, streams=False)
    run.submit(texts[1], 2)
    assert max(sum(pieces) for _, pieces, _ in run.run()) == ALONE


@pytest.mark.parametrize(
    "named",
    [{"max_batch_tokens": 600}, {"target_step_seconds": float("inf")}],
    ids=["tokens", "inf"],
)
def test_what_is_named_is_what_a_step_feeds(
    clocked: Callable[..., Clocked], named: dict[str, Any]
) -> None:
    run = clocked(linear(0.01, 0.0, 1.0), **named)
    run.submit(prompts((5,))[0], 9)
    run.run(3)
    run.submit(prompts((500,))[0], 2)
    assert [sum(pieces) for _, pieces, _ in run.run(2)] == [500, 0]
    run.engine.close()
    both = clocked(linear(0.01, 0.0, 1.0), max_batch_tokens=600, target_step_seconds=0.05)
    both.submit(prompts((500,))[0], 2)
    assert sum(both.run(1)[0][1]) == ALONE


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target_step_seconds": 0}, "target_step_seconds must be a number of seconds, more than"),
        ({"target_step_seconds": "x"}, "target_step_seconds must be a number of seconds"),
        (
            {"target_step_seconds": 0.05, "deterministic": True},
            r"target_step_seconds=0\.05: with deterministic=True prompts are always fed in the",
        ),
        (
            {"target_step_seconds": 0.05, "cache_implementation": "dynamic"},
            r"target_step_seconds=0\.05: the cache 'dynamic' pads .*; select cache 'paged', or dr",
        ),
    ],
)
def test_a_target_that_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        jackfield.load(model_of("engine"), **given)


@pytest.mark.parametrize("given", [{"deterministic": True}, {"cache_implementation": "dynamic"}])
def test_without_being_asked_for_there_is_none_there(given: dict[str, Any]) -> None:
    with jackfield.load(model_of("engine"), **given) as engine:
        assert engine._loop.limits.pace is None


def test_a_full_queue_loses_at_most_a_tenth_by_it(
    clocked: Callable[..., Clocked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where prompts cost little beside a step, as on a GPU, more of them in a step are cheaper."""

    def seconds() -> float:
        cost = linear(0.012, 0.0, 2e-4)
        run = clocked(cost, target_step_seconds=0.05, max_batch_size=8)
        for _ in range(60):
            run.submit(prompts((100,))[0], 8)
        spent = sum(took for _, _, took in run.run(2000))
        run.engine.close()
        return spent

    found = seconds()
    own = TokenBudget.tokens

    def uncrowded(self: TokenBudget, decoding: int, reading: int, *, crowded: bool) -> int:
        return own(self, decoding, reading, crowded=False)

    monkeypatch.setattr(TokenBudget, "tokens", uncrowded)
    assert found <= 1.1 * seconds()
