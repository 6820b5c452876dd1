"""A trace tells where time went: it adds up, changes no token, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from driven import Arrival, Gate, drive, tokens
from encoder_decoders import build as encoder_decoder
from families import build, prompts
from hypothesis import given
from hypothesis import strategies as st
from right_kernel import Right
from traced import assert_adds_up, functions_of, steps_of

import jackfield
from jackfield import JackfieldError, Trace
from jackfield.contracts import Backend
from jackfield.errors import UsageError
from jackfield.tracing import recorder
from jackfield_plugins.attention.sdpa import SdpaAttention as Sdpa

PROMPTS = prompts((9, 4, 13))
PAGED = "paged?page_size=4&num_tokens=256"
Plug = Callable[[Backend], str]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture
def engine(model: Any) -> Iterator[jackfield.Engine]:
    with jackfield.load(model, attn_implementation="sdpa", cache_implementation=PAGED) as engine:
        yield engine


def kinds(trace: Trace) -> dict[tuple[str, ...], dict[str, Any]]:
    return {tuple(row["path"]): row for row in trace.to_dict()["work"]}


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
def test_what_ran_is_in_it_by_kind_backend_layer_and_request(model: Any, cache: str) -> None:
    arguments = {"attn_implementation": "sdpa", "cache_implementation": cache}
    with jackfield.load(model, **arguments) as engine:
        plain = [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=5)]
        with engine.trace() as trace:
            found = engine.generate(PROMPTS, max_new_tokens=5)
        assert [one.token_ids for one in found] == plain
        assert [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=5)] == plain
    totals = assert_adds_up(trace.record)
    told = trace.to_dict()
    assert (told["steps"], told["decode_steps"]) == (5, 4)
    assert told["model"] == "LlamaForCausalLM"
    work = kinds(trace)
    forward = ("steps", "forward")
    inside = {(*forward, kind) for kind in ("attention", "cache writes", "rest")}
    parts = ("scheduling", "preparing", "sampling", "committing", "emitting")
    assert set(work) >= {("emitting",), ("idle",), forward, *inside} | {("steps", p) for p in parts}
    assert work[*forward, "attention"]["calls"] == work[*forward, "cache writes"]["calls"] == 10
    assert sorted(told["layers"]) == [0, 1]
    assert set(told["layers"][0]) == {"attention", "cache writes"}
    assert totals.unseen == 0
    assert told["notes"] == []
    version = jackfield.__version__
    whose = {who.split(" (")[0]: who for who in told["backends"]}
    assert set(whose) >= {"attention sdpa", f"cache {cache}", "scheduler fifo"}
    assert f"(jackfield {version}" in whose["attention sdpa"]
    assert [row["new_tokens"] for row in told["requests"]] == [5, 5, 5]
    assert [row["prompt_tokens"] for row in told["requests"]] == [9, 4, 13]
    for row in told["requests"]:
        assert (row["prefill_steps"], row["decode_steps"]) == (1, 4)
        assert row["finish_reason"] == "length"
        assert not row["began_before"]
        assert row["time_to_first_token"] > 0
    text = str(trace)
    assert "5 steps (1 with prompts)" in text
    assert "\n    attention" in text
    assert "attention by layer, ms on the host" in text


def test_a_prompt_of_one_token_is_a_prompt(engine: jackfield.Engine) -> None:
    with engine.trace() as trace:
        engine.generate([[5]], max_new_tokens=4, eos_token_id=None)
    assert "4 steps (1 with prompts)" in str(trace)
    assert trace.to_dict()["decode_steps"] == 3


def test_a_strangers_attention_is_named_with_its_distribution(model: Any, plug: Plug) -> None:
    class Mine(Sdpa):
        name = "mine"

    mine = plug(Mine())
    with jackfield.load(model, attn_implementation=mine) as engine, engine.trace() as trace:
        engine.generate(PROMPTS, max_new_tokens=3)
    (who,) = (who for who in trace.to_dict()["backends"] if who.startswith("attention"))
    assert who.startswith("attention mine (stranger 1.2")
    assert who in str(trace)


def test_kernels_are_in_it_and_taken_out(model: Any, plug: Plug) -> None:
    with jackfield.load(model, kernels=plug(Right())) as engine:
        before = functions_of(engine)
        with engine.trace() as trace:
            engine.generate(PROMPTS, max_new_tokens=3)
            assert functions_of(engine) != before
        assert functions_of(engine) == before
        calls = engine.report()["kernel"].calls
    assert_adds_up(trace.record)
    assert kinds(trace)["steps", "forward", "kernels"]["calls"] == calls
    assert "kernel right (stranger 1.2)" in trace.to_dict()["backends"]
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_kernel_is_given_back_where_the_engine_is_closed_first(model: Any, plug: Plug) -> None:
    with jackfield.load(model, kernels=plug(Right())) as engine, engine.trace():
        engine.generate(PROMPTS, max_new_tokens=2)
        engine.close()
        assert not any("forward" in vars(module) for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_is_left_of_it(engine: jackfield.Engine) -> None:
    before = functions_of(engine)
    with engine.trace():
        assert functions_of(engine) != before
    assert functions_of(engine) == before
    traces = []
    with contextlib.suppress(ZeroDivisionError), engine.trace() as failed:
        traces.append(failed)
        engine.generate(PROMPTS, max_new_tokens=2)
        1 / 0  # noqa: B018
    assert functions_of(engine) == before
    assert len(traces[0].record.requests) == 3  # what there was until then
    request = engine.submit(PROMPTS[0], max_new_tokens=60)
    with engine.trace():
        pass
    assert functions_of(engine) == before
    request.result(60)
    with engine.trace() as closed:
        request = engine.submit(PROMPTS[0], max_new_tokens=60)
        engine.close()
    assert functions_of(engine) == before
    assert_adds_up(closed.record)
    assert request.done


def test_where_it_cannot_begin_nothing_is_left(
    engine: jackfield.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = functions_of(engine)
    monkeypatch.setattr(engine._intake.__class__, "sequences", property(lambda _: 1 / 0))
    with pytest.raises(ZeroDivisionError), engine.trace():
        pass
    monkeypatch.undo()
    assert functions_of(engine) == before
    with engine.trace():  # the next one can
        pass


def test_one_at_a_time_and_none_of_a_closed_engine(engine: jackfield.Engine) -> None:
    with engine.trace() as trace:
        with pytest.raises(UsageError, match="a trace of this engine goes on already; end that"):
            engine.trace().__enter__()
        with pytest.raises(UsageError, match="the trace goes on; read it behind the `with`"):
            str(trace)
    with engine.trace():
        pass
    engine.close()
    with pytest.raises(UsageError, match="closed"), engine.trace():
        pass


def test_none_begins_inside_a_step(engine: jackfield.Engine) -> None:
    def processor(ids: Any, scores: Any) -> Any:
        with engine.trace():
            return scores

    (found,) = engine.generate(PROMPTS[0], logits_processor=[processor], max_new_tokens=2)
    assert found.finish_reason == "error"
    assert "from inside a step, which would wait for itself" in str(found.error)


def test_it_begins_and_ends_while_requests_run(engine: jackfield.Engine) -> None:
    (plain,) = engine.generate(PROMPTS[0], max_new_tokens=12)
    gate = Gate(engine)
    request = engine.submit(PROMPTS[0], max_new_tokens=12)
    gate.inside()
    gate.let()
    gate.let()  # it decodes
    entered = threading.Event()
    found: list[Trace] = []

    def traces() -> None:
        with engine.trace() as trace:
            found.append(trace)
            entered.set()
            late.wait(60)

    late = threading.Event()
    thread = threading.Thread(target=traces)
    thread.start()
    while not entered.is_set():
        gate.admit()
        entered.wait(0.05)
    second = engine.submit(PROMPTS[1], max_new_tokens=2)
    gate.lift()
    assert second.result(60).finish_reason == "length"
    late.set()
    thread.join(60)
    assert request.result(60).token_ids == plain.token_ids
    (trace,) = found
    assert_adds_up(trace.record)
    first, other = trace.record.requests
    assert (first.began, other.began) == (True, False)
    assert first.changes[0][0] == "decode"
    assert "began before" in str(trace)
    assert other.new_tokens == 2


def test_a_step_that_fails_ends_requests_and_not_the_trace(engine: jackfield.Engine) -> None:
    inner, before = engine._loop.forward, functions_of(engine)
    with engine.trace() as trace:
        traced = engine._loop.forward
        engine._loop.forward = lambda inputs: 1 / 0
        with pytest.raises(JackfieldError, match="division"):
            engine.generate(PROMPTS, max_new_tokens=3)
        engine._loop.forward = traced
        engine.generate(PROMPTS[:1], max_new_tokens=3)
    assert engine._loop.forward is inner
    assert functions_of(engine) == before
    assert_adds_up(trace.record)
    assert [life.outcome for life in trace.record.requests] == ["error"] * 3 + ["length"]


def test_an_attention_of_the_models_own_code_is_not_guessed_at() -> None:
    own = jackfield.load(build("falcon-alibi"), attn_implementation="eager")
    with own as engine, engine.trace() as trace:
        engine.generate(PROMPTS, max_new_tokens=3)
    found = assert_adds_up(trace.record)
    assert (found.layers.get(0, {}).get("attention"), found.steps) == (None, 3)
    assert "is part of the model's own code" in str(trace)


def test_a_request_with_a_negative_prompt_is_one(engine: jackfield.Engine) -> None:
    asked: Any = {"guidance_scale": 1.5, "negative_prompt": PROMPTS[2]}
    with engine.trace() as trace:
        engine.generate(PROMPTS[:2], max_new_tokens=4, **asked)
    assert_adds_up(trace.record)
    assert [(life.prefill_steps, life.decode_steps) for life in trace.record.requests] == [
        (1, 3)
    ] * 2
    request = engine.submit(PROMPTS[0], max_new_tokens=60, **asked)
    next(iter(request))
    with engine.trace() as late:
        request.result(60)
    assert {life.id for life in late.record.requests} <= {request.id}


def test_an_encoder_is_a_row_of_its_own_and_has_no_layers() -> None:
    with jackfield.load(encoder_decoder("t5")) as engine, engine.trace() as trace:
        engine.generate([[5, 6, 7], [8, 9]], max_new_tokens=4, eos_token_id=[])
    found = assert_adds_up(trace.record)
    assert found.rows["steps", "scheduling", "encoder"].calls == 2
    assert found.rows["steps", "forward", "cache writes"].calls == 4 * len(found.layers)
    assert [life.prompt_tokens for life in trace.record.requests] == [3, 2]
    assert found.unseen == 0


@pytest.mark.long
def test_layers_of_a_native_step_are_not_guessed_at(model: Any) -> None:
    with jackfield.load(model, cache_implementation=PAGED, compile="native") as engine:
        plain = engine.generate(PROMPTS, max_new_tokens=6)
        with engine.trace() as trace:
            found = engine.generate(PROMPTS, max_new_tokens=6)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    totals = assert_adds_up(trace.record)
    assert (totals.steps, totals.unseen) == (6, 5)
    assert "no layer could be seen in 5 of 6 steps" in str(trace)
    assert kinds(trace)["steps", "forward", "compiled step"]["calls"] == 5
    assert any(who.startswith("compiler native (jackfield") for who in totals.backends)


def test_attention_that_compiled_steps_call_is_seen(model: Any) -> None:
    compiler = "inductor?backend=eager"
    with jackfield.load(model, cache_implementation=PAGED, compile=compiler) as engine:
        before = functions_of(engine)
        plain = engine.generate(PROMPTS, max_new_tokens=4)
        graphs = engine.report()["compiler"].compiled
        with engine.trace() as trace:
            found = engine.generate(PROMPTS, max_new_tokens=4)
        assert engine.report()["compiler"].compiled == graphs  # nothing was compiled anew
        assert functions_of(engine) == before
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    totals = assert_adds_up(trace.record)
    assert totals.unseen == 0
    inside = ("steps", "forward", "compiled step", "attention")
    assert kinds(trace)[inside]["calls"] == 6


def test_drafts_and_structures_have_rows_of_their_own() -> None:
    with jackfield.load("demo", decoding={"look": "prompt_lookup"}) as engine:
        settings = [{"decoding": "look"}, {"choices": ["yes", "no"]}, {}]
        asked: Any = ["a b a b a b a b", "Is it?", "Once"]
        with engine.trace() as trace:
            found = engine.generate(asked, settings=settings, max_new_tokens=6)
    assert found[1].text in ("yes", "no")
    assert_adds_up(trace.record)
    work = kinds(trace)
    assert ("steps", "sampling", "structures") in work
    assert ("steps", "drafting") in work
    assert any(who.startswith("decoding prompt_lookup") for who in trace.to_dict()["backends"])
    assert any("text" in path for path in work)
    told = str(trace)
    assert "what may follow, by structures" in told
    assert "prompts and settings are read" in told


def test_beams_are_one_request() -> None:
    with jackfield.load(build("llama"), decoding="beam") as other, other.trace() as trace:
        other.generate(PROMPTS[:1], num_beams=3, num_return_sequences=2, max_new_tokens=4)
    assert_adds_up(trace.record)
    assert kinds(trace)["steps", "sampling", "beam search"]["calls"] == 4
    for life in trace.record.requests:
        assert [name for name, _ in life.changes] == ["waiting", "prefill", "decode", "emitting"]
        assert (life.prefill_steps, life.decode_steps) == (1, 3)
    assert len(trace.record.requests) == 2


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def small(model: Any) -> Iterator[jackfield.Engine]:
    """Pages for few, so that some are preempted."""
    cache = "paged?page_size=3&num_tokens=42&prefix_sharing=False"
    with jackfield.load(
        build("llama"), cache_implementation=cache, max_batch_size=3, prefill_chunk_size=5
    ) as engine:
        engine._worker._linger = 0.0
        yield engine


@given(ARRIVALS)
def test_lives_of_requests_add_up(small: jackfield.Engine, coming: list[tuple[int, ...]]) -> None:
    arrivals = [
        Arrival(at, prompt, max_new_tokens=count)
        for (at, _, count), prompt in zip(
            coming, prompts(tuple(length for _, length, _ in coming)), strict=True
        )
    ]
    plain = tokens(drive(small, arrivals))
    with small.trace() as trace:
        found = drive(small, arrivals)
    assert tokens(found) == plain
    totals = assert_adds_up(trace.record)
    assert totals.steps == len(steps_of(trace.record))
    fed = [pair for span in steps_of(trace.record) for pair in span.detail.sequences]
    lives = trace.record.requests
    assert [life.id for life in lives] == sorted(one.id for (one,) in found)
    for life, (sequence,) in zip(lives, sorted(found, key=lambda one: one[0].id), strict=True):
        assert life.new_tokens == sequence.num_new
        assert life.outcome == "length"
        mine = sum(number == life.id for number, _ in fed)
        assert life.prefill_steps + life.decode_steps == mine
        names = [name for name, _ in life.changes]
        assert names[:2] == ["waiting", "prefill"]
        assert names[-1] == "emitting"
        assert names.count("waiting") == 1 + life.preemptions
        if not life.preemptions:
            assert life.decode_steps == life.new_tokens - 1
            assert sum(count for number, count in fed if number == life.id) == (
                life.prompt_tokens + life.new_tokens - 1
            )


def test_a_long_trace_keeps_its_end_and_says_what_was_dropped(
    engine: jackfield.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST", 100)
    with engine.trace() as trace:
        engine.generate(PROMPTS, max_new_tokens=40)
    totals = assert_adds_up(trace.record)
    assert 1 <= totals.steps < 40
    assert 50 < len(trace.record.spans) <= 140
    assert "spans were dropped: what is told begins" in str(trace)
    assert [life.new_tokens for life in trace.record.requests] == [40, 40, 40]


def test_what_a_trace_holds_is_no_engine(engine: jackfield.Engine) -> None:
    """Neither requests nor tensors: figures only."""
    with engine.trace() as trace:
        engine.generate(PROMPTS, max_new_tokens=3, output_logits=True)
    assert all(life.sequence is None for life in trace.record.requests)
    plain = (int, type(None), tuple)
    assert all(isinstance(span.detail, plain) for span in trace.record.spans)
