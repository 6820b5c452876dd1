"""Steps begun before the tokens of the one before are read: the same texts, all given back.

On a GPU engines do so by themselves (`tests/conformance/test_waits.py` has one that is none); here
they are told to, with the same code.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from driven import Arrival, drive, tokens
from families import STATES_APART, build
from recordable import offer
from tape import Tapes, record_on

import jackfield
from jackfield.contracts.decoding import SAMPLER_SETTINGS
from jackfield.engine.ahead import Begun
from jackfield.engine.engine import Engine
from jackfield.engine.loop import Loop
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

PAGED = "paged?page_size=4&num_tokens=512"
ENDS = [5, 17, 23, 40, 61, 88]  # so that texts end anywhere


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What came of each try to begin a step early."""
    found: list[Any] = []
    following = Loop._following

    def noting(self: Loop, before: Begun) -> Any:
        found.append(following(self, before))
        return found[-1]

    monkeypatch.setattr(Loop, "_following", noting)
    return found


def load(model: Any = None, cache: str = PAGED, *, overlaps: bool = True, **more: Any) -> Engine:
    model = build("llama") if model is None else model
    if not isinstance(model, str):
        model.generation_config.eos_token_id = ENDS
    engine = jackfield.load(model, cache_implementation=cache, **more)
    engine._loop.overlaps = overlaps
    return engine


def in_order(engine: Engine) -> list[int]:
    """From now on nothing but its `commit` may come behind a `prepare` that is computed.

    Returns how many tokens each step has, as they come.
    """
    cache, opened = engine._loop.cache, []
    sizes: list[int] = []

    def watched(name: str, inner: Any) -> Any:
        def call(*given: Any) -> Any:
            assert name == "commit" or not opened, f"{name} while a step is prepared"
            if name == "prepare":
                opened.append(given[0])
                sizes.append(sum(item.num_tokens for item in given[0].scheduled))
            elif name == "commit":
                assert opened.pop() is given[0]
            return inner(*given)

        return call

    for name in ("admit", "prepare", "commit", "release", "preempt", "fork"):
        setattr(cache, name, watched(name, getattr(cache, name)))
    return sizes


def num_begun(found: list[Any]) -> int:
    return sum(isinstance(step, Begun) for step in found)


def left_clean(engine: Engine) -> None:
    loop, usage = engine._loop, engine._loop.cache.usage()
    assert (loop._begun, loop._leaving, loop.running) == (None, [], [])
    assert usage is not None
    assert usage.pages_used == 0


WANTED: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
    {"max_new_tokens": 9, "do_sample": True, "seed": 3},
    {"max_new_tokens": 15, "do_sample": True, "seed": 5, "temperature": 0.7, "top_p": 0.8},
    {"max_new_tokens": 11, "do_sample": True, "seed": 6, "top_k": 5, "logprobs": 2},
    {"max_new_tokens": 14, "min_new_tokens": 14},
    {"max_new_tokens": 13, "logprobs": 1},
    {"max_new_tokens": 10, "sequence_bias": {(7,): 2.0}},
]
#: What needs the tokens themselves: such a step is waited for.
LOOKING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"sequence_bias": {(3, 4): 1.0}},
    {"no_repeat_ngram_size": 2},
    {"decoding": "prompt_lookup"},
    {"num_beams": 2, "decoding": "beam"},
    {"guidance_scale": 1.5},
    {"output_logits": True},
    {"logits_processor": [lambda ids, scores: scores]},
]


#: A value of each setting of the sampler. What looks at tokens in a way that the loop does not
#: know would be chosen by placeholders.
EACH: dict[str, dict[str, Any]] = {
    "bad_words_ids": {"bad_words_ids": [[7], [8, 9]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [7, 8]},
    "do_sample": {"do_sample": True, "seed": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "epsilon_cutoff": {"epsilon_cutoff": 0.005, "do_sample": True, "seed": 1},
    "eta_cutoff": {"eta_cutoff": 0.005, "do_sample": True, "seed": 1},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.2)},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "guidance_scale": {"guidance_scale": 1.5},
    "logits_processor": {"logits_processor": [lambda ids, scores: scores - (ids[:, -1:] % 7)]},
    "logprobs": {"logprobs": 2},
    "min_length": {"min_length": 14},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_p": {"min_p": 0.05, "do_sample": True, "seed": 1},
    "negative_prompt": {"negative_prompt": [3, 4], "guidance_scale": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "output_logits": {"output_logits": True},
    "output_scores": {"output_scores": True},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1] + 3) % 120, 9, 11]
    },
    "presence_penalty": {"presence_penalty": 0.7},
    "remove_invalid_values": {"remove_invalid_values": True},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "seed": {"seed": 4, "do_sample": True},
    "sequence_bias": {"sequence_bias": {(7,): 2.0, (7, 8): 3.0}},
    "stopping_criteria": {"stopping_criteria": [lambda ids, scores, **_: len(ids[0]) > 9]},
    "suppress_tokens": {"suppress_tokens": [7, 8]},
    "temperature": {"temperature": 0.7, "do_sample": True, "seed": 1},
    "top_h": {"top_h": 0.6, "do_sample": True, "seed": 1},
    "top_k": {"top_k": 4, "do_sample": True, "seed": 1},
    "top_p": {"top_p": 0.7, "do_sample": True, "seed": 1},
    "typical_p": {"typical_p": 0.7, "do_sample": True, "seed": 1},
    "watermarking_config": {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 3.0}},
}


def arrivals(count: int, seed: int, more: list[dict[str, Any]] = WANTED) -> list[Arrival]:
    """Requests of all kinds that join while others run; some share their first pages."""
    chance = random.Random(seed)
    shared = [chance.randrange(2, 100) for _ in range(17)]
    made = []
    for at in range(count):
        own = [chance.randrange(2, 100) for _ in range(chance.choice((1, 3, 9, 20)))]
        prompt = [*shared, *own] if chance.random() < 0.3 else own
        made.append(Arrival(chance.randrange(2 * count), prompt, **more[at % len(more)]))
    return made


def told(sequences: Any) -> list[Any]:
    return [(s.new_tokens, s.finish_reason, len(s.logprobs)) for (s,) in sequences]


@pytest.mark.parametrize("most", [{}, {"prefill_chunk_size": 5}, {"max_batch_tokens": 9}])
@pytest.mark.parametrize("cache", [PAGED, "paged?page_size=4&num_tokens=72&swap=true"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("size", [1, 6, 24])
@pytest.mark.one_in(2)
def test_texts_are_the_same(
    size: int, family: str, cache: str, most: dict[str, int], begun: list[Any]
) -> None:
    """Joins, ends, preemptions, shared prefixes, each row of its own settings."""
    coming, counted = arrivals(size, seed=size), []
    for overlaps in (False, True):
        made = load(build(family), cache, max_batch_size=7, overlaps=overlaps, **most)
        with made as engine:
            sizes = in_order(engine)
            texts = told(drive(engine, coming))
            left_clean(engine)
            metrics, calls = engine._loop.metrics, engine._loop.decoding.calls
            assert calls["sample"] == engine._loop.steps == len(sizes)
            assert metrics.tokens_computed == sum(sizes)
            counted.append((texts, metrics.tokens_out, dict(metrics.finished)))
        assert bool(begun) == overlaps
    assert counted[0] == counted[1]
    assert num_begun(begun) >= 5


def test_a_scheduler_is_shown_no_token_that_is_none(begun: list[Any]) -> None:
    """The last one is missing where it is not known, and counted."""
    shown: list[tuple[list[int], list[int]]] = []
    with load() as engine:
        schedule = engine._loop.scheduler.schedule

        def noting(running: Any, uncached: Any, budget: int, now: float) -> list[int]:
            shown.append(([*running[0].new_tokens], list(uncached)))
            return schedule(running, uncached, budget, now)

        engine._loop.scheduler.schedule = noting  # type: ignore[method-assign]
        (text,) = engine.generate([[3, 4, 5]], max_new_tokens=5, min_new_tokens=5)
    assert [own for own, _ in shown] == [[], *(text.token_ids[:n] for n in range(4))]
    assert [uncached for _, uncached in shown] == [[3], [1], [1], [1], [1]]
    assert num_begun(begun) == 4


def test_whom_the_scheduler_leaves_out_is_not_forgotten(begun: list[Any]) -> None:
    """Who is given nothing in a step that is begun early goes on in the next one."""
    coming = [Arrival(0, [n + 3, 4], max_new_tokens=12, min_new_tokens=12) for n in range(2)]
    with load(overlaps=False) as engine:
        due = tokens(drive(engine, coming))
    with load() as engine:
        schedule, calls = engine._loop.scheduler.schedule, 0

        def pausing(running: Any, uncached: Any, budget: int, now: float) -> list[int]:
            nonlocal calls
            calls += 1
            found = schedule(running, uncached, budget, now)
            return [found[0], 0] if calls == 4 and len(found) == 2 else found

        engine._loop.scheduler.schedule = pausing  # type: ignore[method-assign]
        ahead: list[int] = []

        def note(loop: Loop) -> None:
            if len(loop.running) == 2:
                ahead.append(loop.running[0].num_new - loop.running[1].num_new)

        assert tokens(drive(engine, coming, note)) == due
        assert max(ahead) == 1


@pytest.mark.skipif(not STATES_APART, reason="this transformers hands states on in another way")
def test_states_beside_pages_wait_for_each_step() -> None:
    with load(build("qwen3-next"), "paged?page_size=4&num_tokens=400", overlaps=False) as engine:
        assert engine._loop.cache.overlaps is False


def test_what_leaves_is_given_back_by_a_reset() -> None:
    """After a failure between two steps, one is begun and somebody has left meanwhile."""
    with load() as engine:
        loop, many = engine._loop, []
        for n in range(2):
            many += engine._intake.sequences([n + 3, 4], {"max_new_tokens": 30}, streams=False)
        for one in many:
            loop.submit(one)
        for _ in range(3):
            loop.step()
        assert isinstance(loop._begun, Begun)
        loop.cancel(many[1])
        loop.reset()
        left_clean(engine)
        assert [one.finish_reason for one in many] == ["error", "cancelled"]
        (done,) = engine.generate([[5, 6]], max_new_tokens=3, min_new_tokens=3)
        assert len(done.token_ids) == 3


@pytest.mark.parametrize("own", LOOKING, ids=lambda own: next(iter(own)))
def test_what_looks_at_tokens_is_waited_for(own: dict[str, Any], begun: list[Any]) -> None:
    """And beside those that look at none all are."""
    more = [{"max_new_tokens": 12}, {"max_new_tokens": 12, **own}]
    names = [own["decoding"], "sample"] if "decoding" in own else ["sample"]
    texts = []
    for overlaps in (False, True):
        with load(overlaps=overlaps, decoding=names) as engine:
            coming = [Arrival(0, [7, 8, 9, 7, 8], **settings) for settings in more]
            texts.append([[s.new_tokens for s in own] for own in drive(engine, coming)])
            left_clean(engine)
    assert texts[0] == texts[1]
    assert all(len(step.step.scheduled) == 1 for step in begun if step is not None)


@pytest.mark.parametrize("name", sorted(SAMPLER_SETTINGS))
@pytest.mark.one_in(4)
def test_every_setting_of_the_sampler(name: str) -> None:
    found = []
    for overlaps in (False, True):
        with load(overlaps=overlaps) as engine:
            asked = {"max_new_tokens": 14, **EACH[name]}
            coming = [
                Arrival(at, [7, 8, 9 + at], **asked if at else {"max_new_tokens": 14})
                for at in range(3)
            ]
            told = drive(engine, coming)
            found.append([[(s.new_tokens, s.finish_reason) for s in own] for own in told])
            left_clean(engine)
    assert found[0] == found[1]


def test_a_stop_string_ends_a_text_in_time(begun: list[Any]) -> None:
    found = []
    for overlaps in (False, True):
        with load("demo", overlaps=overlaps) as engine:
            (done,) = engine.generate(["Once upon a time"], max_new_tokens=40, stop=[" the", "."])
            found.append((done.text, done.token_ids, done.finish_reason))
    assert found[0] == found[1]
    assert num_begun(begun) >= 1


def test_streams_say_the_same(begun: list[Any]) -> None:
    found = []
    for overlaps in (False, True):
        with load("demo", overlaps=overlaps) as engine:
            told = engine.stream("Tom had a", max_new_tokens=20)
            found.append([(delta.text, delta.token_ids) for delta in told])
    assert found[0] == found[1]
    assert num_begun(begun) >= 3


def test_whoever_is_cancelled_leaves_and_the_rest_goes_on(begun: list[Any]) -> None:
    """In any step, while the next one is computed already."""
    coming = arrivals(9, seed=4, more=[{"max_new_tokens": 14}])
    with load(overlaps=False) as engine:
        due = tokens(drive(engine, coming))
    for seed in range(6):
        chance = random.Random(seed)

        def cancel(loop: Loop, chance: random.Random = chance) -> None:
            if loop.running and chance.random() < 0.25:
                loop.cancel(chance.choice(loop.running))

        with load() as engine:
            found = drive(engine, coming, cancel)
            left_clean(engine)
        for (sequence,), whole in zip(found, due, strict=True):
            if sequence.finish_reason == "cancelled":
                assert sequence.new_tokens == whole[: sequence.num_new]
            else:
                assert sequence.new_tokens == whole
    assert num_begun(begun) >= 20


def test_the_last_one_is_cancelled() -> None:
    with load() as engine:
        (sequence,) = engine._intake.sequences([3, 4, 5], {"max_new_tokens": 30}, streams=False)
        loop = engine._loop
        loop.submit(sequence)
        for _ in range(3):
            loop.step()
        assert isinstance(loop._begun, Begun)
        loop.cancel(sequence)
        left_clean(engine)
        assert engine.generate([[3, 4, 5]], max_new_tokens=3)[0].token_ids


def test_who_gets_no_token_ends_alone(begun: list[Any]) -> None:
    forbidden = {(token,): float("-inf") for token in range(120)}
    with load(overlaps=False) as engine:
        due = engine.generate([[7, 8]], max_new_tokens=9)[0].token_ids
    with load() as engine:
        whole, none = drive(
            engine,
            [
                Arrival(0, [7, 8], max_new_tokens=9),
                Arrival(0, [9], max_new_tokens=9, sequence_bias=forbidden),
            ],
        )
        left_clean(engine)
    assert whole[0].new_tokens == due
    assert (none[0].finish_reason, none[0].new_tokens) == ("error", [])
    assert num_begun(begun) >= 5


def broken_at(number: int, forward: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """`forward`, of which one call fails."""
    calls = itertools.count(1)

    def broken(inputs: Any) -> torch.Tensor:
        if next(calls) == number:
            raise ExecutionError("broken")
        return forward(inputs)

    return broken


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_step_that_fails_takes_no_token_back(after: int) -> None:
    """All have what was chosen before; the next request finds the engine as it was."""
    with load() as engine:
        loop, inner = engine._loop, engine._loop.forward
        loop.forward = broken_at(after + 1, loop.forward)
        request = engine.submit([3, 4, 5], max_new_tokens=30, min_new_tokens=30)
        with pytest.raises(ExecutionError, match="broken"):
            request.result()
        loop.forward = inner
        assert engine.health().inside is None
        left_clean(engine)
        (done,) = engine.generate([[3, 4, 5]], max_new_tokens=9, min_new_tokens=9)
        assert len(done.token_ids) == 9


def test_a_step_that_failed_early_is_where_nobody_is() -> None:
    """Until it is raised, health looks for nobody inside of it."""
    with load() as engine:
        loop = engine._loop
        loop.forward = broken_at(2, loop.forward)
        (one,) = engine._intake.sequences([3, 4], {"max_new_tokens": 9}, streams=False)
        loop.submit(one)
        assert [event.sequence for event in loop.step()] == [one]
        assert (loop.doing, one.num_new) == (None, 1)
        with pytest.raises(ExecutionError, match="broken"):
            loop.step()
        loop.reset()
        left_clean(engine)


def test_a_step_that_nobody_waits_for_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """It is told, and harms nobody: its text has ended by the token before."""
    with load() as engine:
        loop, inner = engine._loop, engine._loop.forward
        plain = {"max_new_tokens": 2, "eos_token_id": 119}
        whole = engine.generate([[3, 4, 5]], **plain)[0].token_ids
        assert len(set(whole)) == 2
        loop.forward = broken_at(3, loop.forward)
        asked = {"max_new_tokens": 9, "eos_token_id": whole[1]}
        (done,) = engine.generate([[3, 4, 5]], **asked)
        loop.forward = inner
        assert (done.token_ids, done.finish_reason) == (whole, "stop")
        assert "a step that nobody waits for any more failed: broken" in caplog.text
        left_clean(engine)
        assert engine.generate([[3, 4, 5]], **asked)[0].token_ids == whole


def test_who_waits_enters_a_step_later_at_most() -> None:
    with load() as engine:
        loop = engine._loop
        first, second = (
            engine._intake.sequences(
                [n, 4, 5], {"max_new_tokens": 30, "min_new_tokens": 30}, streams=False
            )[0]
            for n in (3, 9)
        )
        loop.submit(first)
        for _ in range(4):
            loop.step()
        loop.submit(second)
        loop.step()
        loop.step()
        assert second.num_new == 1
        assert first.num_new == 6
        drive(engine, [])
        left_clean(engine)


def test_there_is_no_room_for_the_next_step(begun: list[Any]) -> None:
    """Then nobody is preempted for it: the loop does so when it comes to it."""
    coming = [Arrival(0, [n + 2] * 9, max_new_tokens=20, min_new_tokens=20) for n in range(3)]
    with load(cache="paged?page_size=4&num_tokens=60") as engine:
        found = tokens(drive(engine, coming))
        assert engine._loop.metrics.preemptions > 0
        left_clean(engine)
    with load() as engine:
        assert tokens(drive(engine, coming)) == found


class _Whole(Tapes):
    changes = True


@pytest.mark.parametrize("size", [1, 12])
def test_recorded_steps(size: int, begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At fixed places ids are written over what is prepared there; it is a stranger's attention."""
    record_on(monkeypatch, _Whole)
    offer(monkeypatch)
    coming = arrivals(size, seed=2)
    with load(overlaps=False) as engine:
        due = told(drive(engine, coming))
    more = {"attn_implementation": "gathers", "compile": "cuda_graph?record=both"}
    with load(max_batch_size=5, **more) as engine:
        assert told(drive(engine, coming)) == due
        assert engine.report()["compiler"].compiled.whole > 5
        left_clean(engine)
    assert num_begun(begun) >= 5


def test_a_trace_waits_for_each_step(begun: list[Any]) -> None:
    """Else a step would have parts of two."""
    with load() as engine:
        engine.generate([3, 4], max_new_tokens=6)
        before = num_begun(begun)
        assert before
        with engine.trace() as trace:
            engine.generate([3, 4], max_new_tokens=6)
        assert num_begun(begun) == before
        assert "note: steps wait for the last one's tokens here" in str(trace)
        engine.generate([3, 4], max_new_tokens=6)
        assert num_begun(begun) > before
