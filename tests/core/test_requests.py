"""The life of a request: how it is read, how it ends, and what its end means for the others."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from driven import Gate, age, recorded
from families import build, character_tokenizer, prompts
from poison import NONSENSE

import jackfield
from jackfield import Completion, Engine
from jackfield.errors import ExecutionError, QueueFullError, UsageError

if TYPE_CHECKING:
    import torch

PROMPTS = prompts((3, 9, 1, 6, 12, 2, 5, 8))
COUNT = 10
PAGED = "paged?page_size=4&num_tokens=256"


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


Load = Callable[..., Engine]


@pytest.fixture
def load(model: Any) -> Iterator[Load]:
    """Load the model; the engine is closed and must have given every page back."""
    made: list[Engine] = []

    def make(**more: Any) -> Engine:
        sizes = {"tokenizer": character_tokenizer(), "cache_implementation": PAGED}
        made.append(jackfield.load(model, **{**sizes, **more}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        usage = engine._loop.cache.usage()
        assert usage is None or (usage.pages_used, usage.swapped) == (0, 0)


@pytest.fixture
def engine(load: Load) -> Engine:
    return load()


@pytest.fixture(scope="module")
def alone(model: Any) -> list[Completion]:
    with jackfield.load(model, tokenizer=character_tokenizer()) as engine:
        return [engine.generate(p, max_new_tokens=COUNT)[0] for p in PROMPTS]


def sequence_of(engine: Engine, request: Any) -> Any:
    return engine._worker._open[request.id][0]


def settled(engine: Engine) -> None:
    """Wait until nothing is left to do."""
    worker = engine._worker
    with worker._changed:
        assert worker._changed.wait_for(lambda: not worker._open and worker._thread is None, 60)


def test_a_result_can_be_waited_for_and_asked_for_again(engine: Engine, alone: Any) -> None:
    gate = Gate(engine)
    request = engine.submit(PROMPTS[0], max_new_tokens=COUNT)
    gate.inside()
    with pytest.raises(TimeoutError, match=rf"request {request.id} .*0\.01 s"):
        request.result(0.01)
    with pytest.raises(TimeoutError):
        request.result(timeout=0)
    assert not request.done
    gate.lift()
    completion = request.result(60)
    assert request.done
    assert request.result() is request.result(0) is completion
    assert completion.token_ids == alone[0].token_ids
    assert completion.text == alone[0].text


def test_each_delta_is_handed_out_once_in_whatever_way(engine: Engine, alone: Any) -> None:
    request = engine.submit(PROMPTS[1], max_new_tokens=COUNT)
    first = next(iter(request)).token_ids

    async def rest() -> list[int]:
        return [token async for delta in request for token in delta.token_ids]

    assert first + asyncio.run(rest()) == alone[1].token_ids
    assert list(request) == []
    assert asyncio.run(rest()) == []
    assert request.result(0).token_ids == alone[1].token_ids


def test_for_async_for_and_await_give_the_same(engine: Engine, alone: Any) -> None:
    async def read(prompt: list[int]) -> list[Any]:
        request = engine.submit(prompt, max_new_tokens=COUNT)
        stream = engine.astream(prompt, max_new_tokens=COUNT)
        deltas = [delta async for delta in stream]
        return [await request, deltas[-1].completion, "".join(d.text for d in deltas)]

    awaited, streamed, text = asyncio.run(read(PROMPTS[3]))
    read_on = list(engine.submit(PROMPTS[3], max_new_tokens=COUNT))[-1].completion
    assert read_on is not None
    expected = alone[3].token_ids
    assert awaited.token_ids == streamed.token_ids == read_on.token_ids == expected
    assert text == awaited.text == alone[3].text


def test_event_loops_and_threads_share_an_engine(load: Load, alone: Any) -> None:
    engine, found = load(max_batch_size=3), {}

    async def one(i: int) -> list[int]:
        request = engine.submit(PROMPTS[i], max_new_tokens=COUNT)
        if i % 2:
            return (await request).token_ids
        return [token async for delta in request for token in delta.token_ids]

    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*(one(i) for i in range(len(PROMPTS)))))

    def loop(number: int) -> None:
        found[number] = asyncio.run(all_of_them())

    def thread(number: int) -> None:
        requests = [engine.submit(p, max_new_tokens=COUNT) for p in PROMPTS]
        found[number] = [r.result(60).token_ids for r in requests]

    threads = [threading.Thread(target=loop if n % 2 else thread, args=(n,)) for n in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert found == {n: [c.token_ids for c in alone] for n in range(6)}


def test_two_readers_in_one_event_loop_wait_for_one_request(engine: Engine, alone: Any) -> None:
    async def both() -> list[Completion]:
        request = engine.submit(PROMPTS[1], max_new_tokens=COUNT)

        async def wait() -> Completion:
            return await request

        return list(await asyncio.gather(wait(), wait()))

    assert [c.token_ids for c in asyncio.run(both())] == [alone[1].token_ids] * 2


def test_one_that_waits_is_cancelled_before_anything_is_computed_for_it(
    load: Load, alone: Any, monkeypatch: Any
) -> None:
    engine = load(max_batch_size=1)
    steps, gate = recorded(engine._loop.cache, monkeypatch), Gate(engine)
    running = engine.submit(PROMPTS[0], max_new_tokens=COUNT)
    gate.inside()
    waiting = engine.submit(PROMPTS[1], max_new_tokens=COUNT)
    waiting.cancel()
    waiting.cancel()
    gate.lift()
    completion = waiting.result(60)
    assert (completion.finish_reason, completion.token_ids, completion.text) == (
        "cancelled",
        [],
        "",
    )
    assert running.result(60).token_ids == alone[0].token_ids
    assert {item.sequence.id for step in steps for item in step.scheduled} == {running.id}


def test_one_whose_prompt_is_read_is_cancelled_after_that_step(load: Load, alone: Any) -> None:
    engine = load(prefill_chunk_size=2)
    gate = Gate(engine)
    request = engine.submit(PROMPTS[4], max_new_tokens=COUNT)
    gate.inside()
    gate.let()
    engine.cancel(request)
    gate.lift()
    assert request.result(60).finish_reason == "cancelled"
    assert request.result().token_ids == []
    settled(engine)
    assert engine.statistics().tokens_computed == 2 * 2
    assert engine.generate(PROMPTS[4], max_new_tokens=COUNT)[0].token_ids == alone[4].token_ids


def test_one_that_decodes_is_cancelled_with_what_there_was(engine: Engine, alone: Any) -> None:
    gate = Gate(engine)
    other = engine.submit(PROMPTS[5], max_new_tokens=COUNT)
    gate.inside()
    request = engine.submit(PROMPTS[1], max_new_tokens=COUNT)
    for _ in range(4):
        gate.let()
    request.cancel()
    gate.lift()
    completion = request.result(60)
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == alone[1].token_ids[:4]
    assert completion.text == alone[1].text[: len(completion.text)]
    assert [t for delta in request for t in delta.token_ids] == completion.token_ids
    assert other.result(60).token_ids == alone[5].token_ids
    assert engine.statistics().finished == {"cancelled": 1, "length": 1}


def test_one_that_has_ended_is_not_cancelled(engine: Engine, alone: Any) -> None:
    request = engine.submit(PROMPTS[1], max_new_tokens=COUNT)
    completion = request.result(60)
    request.cancel()
    engine.cancel(request)
    assert request.result() is completion
    assert completion.finish_reason == "length"
    settled(engine)
    request.cancel()
    assert engine._worker._thread is None


def test_a_deadline_ends_one_that_runs_with_what_there_was(engine: Engine, alone: Any) -> None:
    gate = Gate(engine)
    request = engine.submit(PROMPTS[1], max_new_tokens=COUNT, deadline=50)
    other = engine.submit(PROMPTS[0], max_new_tokens=COUNT, deadline=500)
    gate.inside()
    for _ in range(3):
        gate.let()
    age(engine, sequence_of(engine, request), 100)
    gate.lift()
    completion = request.result(60)
    assert completion.finish_reason == "cancelled"
    assert completion.error == "its deadline of 50 s passed"
    assert completion.token_ids == alone[1].token_ids[: len(completion.token_ids)]
    assert 3 <= len(completion.token_ids) <= 4
    assert completion.text
    assert alone[1].text.startswith(completion.text)
    assert other.result(60).token_ids == alone[0].token_ids


def test_a_deadline_ends_one_that_waits(load: Load, alone: Any) -> None:
    engine = load(max_batch_size=1)
    gate = Gate(engine)
    running = engine.submit(PROMPTS[0], max_new_tokens=COUNT)
    gate.inside()
    waiting = engine.submit(PROMPTS[1], max_new_tokens=COUNT, deadline=50)
    age(engine, sequence_of(engine, waiting), 100)
    gate.lift()
    completion = waiting.result(60)
    assert (completion.finish_reason, completion.token_ids) == ("cancelled", [])
    assert completion.error == "its deadline of 50 s passed"
    assert running.result(60).token_ids == alone[0].token_ids


def test_generate_returns_what_came_before_a_deadline(engine: Engine) -> None:
    late, whole = engine.generate(
        PROMPTS[:2], settings=[{"deadline": 1e-6}, {}], max_new_tokens=COUNT
    )
    assert (late.finish_reason, late.token_ids) == ("cancelled", [])
    assert whole.finish_reason == "length"


def test_a_higher_priority_enters_first(load: Load, monkeypatch: Any) -> None:
    engine = load(max_batch_size=1)
    steps, gate = recorded(engine._loop.cache, monkeypatch), Gate(engine)
    first = engine.submit(PROMPTS[0], max_new_tokens=2)
    gate.inside()
    later = [engine.submit(PROMPTS[0], max_new_tokens=2, priority=p) for p in (0, 5, -1, 5)]
    gate.lift()
    for request in later:
        request.result(60)
    order = list(dict.fromkeys(step.scheduled[0].sequence.id for step in steps))
    assert order == [first.id, later[1].id, later[3].id, later[0].id, later[2].id]


def test_a_full_queue_refuses_and_generate_waits(load: Load, alone: Any) -> None:
    engine = load(max_batch_size=1, max_waiting=2)
    gate = Gate(engine)
    found: list[Completion] = []
    requests = [engine.submit(PROMPTS[0], max_new_tokens=COUNT)]
    gate.inside()
    assert engine.health().ready
    requests += [engine.submit(p, max_new_tokens=COUNT) for p in PROMPTS[1:3]]
    assert not engine.health().ready
    for act in (
        lambda: engine.submit(PROMPTS[3]),
        lambda: next(engine.stream(PROMPTS[3])),
        lambda: asyncio.run(anext(engine.astream(PROMPTS[3]))),
    ):
        with pytest.raises(QueueFullError, match="2 requests wait already, and max_waiting=2"):
            act()
    thread = threading.Thread(
        target=lambda: found.extend(engine.generate(PROMPTS, max_new_tokens=COUNT))
    )
    thread.start()
    gate.lift()
    thread.join(60)
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    assert [r.result(60).token_ids for r in requests] == [c.token_ids for c in alone[:3]]
    assert engine.health().ready


def test_who_waits_for_room_hears_that_the_engine_was_closed(load: Load) -> None:
    engine = load(max_batch_size=1, max_waiting=1)
    gate, failures = Gate(engine), []
    engine.submit(PROMPTS[0], max_new_tokens=COUNT)
    gate.inside()

    def client() -> None:
        try:
            engine.generate(PROMPTS, max_new_tokens=COUNT)
        except UsageError as error:
            failures.append(str(error))

    thread = threading.Thread(target=client)
    thread.start()
    gate.close()
    thread.join(60)
    assert len(failures) == 1
    assert "closed" in failures[0]


@pytest.mark.parametrize("leave", ["close", "collect"])
def test_a_reader_that_goes_away_cancels_its_request(engine: Engine, leave: str) -> None:
    gate = Gate(engine)
    stream = engine.stream(PROMPTS[0], max_new_tokens=COUNT)
    gate.admit()
    next(stream)
    if leave == "close":
        stream.close()
    else:
        del stream
        gc.collect()
    gate.lift()
    settled(engine)
    assert engine.statistics().finished == {"cancelled": 1}


@pytest.mark.parametrize("leave", ["break", "task"])
def test_an_async_reader_that_goes_away_cancels_its_request(engine: Engine, leave: str) -> None:
    async def read() -> None:
        async for _ in engine.astream(PROMPTS[0], max_new_tokens=COUNT):
            if leave == "break":
                break

    async def give_up() -> None:
        task = asyncio.create_task(read())
        await asyncio.to_thread(gate.inside)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    gate = Gate(engine)
    if leave == "break":
        gate.admit()
    asyncio.run(read() if leave == "break" else give_up())
    gate.lift()
    settled(engine)
    assert engine.statistics().finished == {"cancelled": 1}


def test_a_stream_that_is_dropped_after_its_event_loop_is_cancelled(engine: Engine) -> None:
    """Nobody can run an asynchronous generator to its end then, `finally` included."""
    gate = Gate(engine)
    gate.admit()
    loop = asyncio.new_event_loop()
    stream: Any = engine.astream(PROMPTS[0], max_new_tokens=COUNT)
    loop.run_until_complete(anext(stream))
    loop.close()
    del stream
    gc.collect()
    gate.lift()
    settled(engine)
    assert engine.statistics().finished == {"cancelled": 1}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_runs_is_not_copied(engine: Engine, copied: Callable[[Any], object]) -> None:
    request = engine.submit(PROMPTS[0], max_new_tokens=COUNT)
    for one in (engine, request):
        with pytest.raises(UsageError, match="cannot be copied"):
            copied(one)
    completion = request.result()
    assert copy.deepcopy(completion) == completion


def test_an_event_loop_that_is_closed_disturbs_nobody(engine: Engine, alone: Any) -> None:
    gate = Gate(engine)
    request = engine.submit(PROMPTS[1], max_new_tokens=COUNT)
    other = engine.submit(PROMPTS[0], max_new_tokens=COUNT)

    async def wait() -> Completion:
        return await request

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    assert request._wakers
    loop.close()
    gate.lift()
    assert other.result(60).token_ids == alone[0].token_ids
    assert request.result(60).token_ids == alone[1].token_ids
    assert not task.done()
    assert engine.generate(PROMPTS[2], max_new_tokens=COUNT)[0].token_ids == alone[2].token_ids
    task.get_coro().close()


@pytest.mark.parametrize("what", NONSENSE)
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "drawn"])
def test_a_processor_that_fails_ends_its_own_request(
    engine: Engine, alone: Any, what: str, sampled: dict[str, Any]
) -> None:
    settings: list[dict[str, Any]] = [{} for _ in PROMPTS]
    settings[3] = {"logits_processor": NONSENSE[what], **sampled}
    found = engine.generate(PROMPTS, settings=settings, max_new_tokens=COUNT)
    assert (found[3].finish_reason, found[3].token_ids) == ("error", [])
    assert "\n" not in found[3].error
    assert "logits_processor" in found[3].error or "no token can be chosen" in found[3].error
    del found[3]
    assert [c.token_ids for c in found] == [c.token_ids for i, c in enumerate(alone) if i != 3]


def test_a_processor_that_hangs_is_named(engine: Engine) -> None:
    entered, leave = threading.Event(), threading.Event()

    def waits(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert leave.wait(60)
        return scores

    assert engine.health().inside is None
    request = engine.submit(PROMPTS[0], max_new_tokens=1, logits_processor=waits)
    assert entered.wait(60)
    assert engine.health().inside == f"the logits_processor of request {request.id}"
    leave.set()
    assert request.result(60).finish_reason == "length"
    settled(engine)
    assert engine.health().inside is None


def test_a_processor_that_asks_its_own_engine_does_not_hang(engine: Engine, alone: Any) -> None:
    def asking(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.generate(PROMPTS[2], max_new_tokens=1)
        return scores

    found = engine.generate(
        PROMPTS[:2], settings=[{}, {"logits_processor": asking}], max_new_tokens=COUNT
    )
    assert found[0].token_ids == alone[0].token_ids
    assert found[1].finish_reason == "error"
    assert "cannot be made from inside a step" in found[1].error


def test_a_processor_may_cancel_its_request(engine: Engine, alone: Any) -> None:
    requests: list[Any] = []

    def leaving(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(PROMPTS[1]) + 2:
            requests[0].cancel()
        return scores

    gate = Gate(engine)
    requests.append(engine.submit(PROMPTS[1], max_new_tokens=COUNT, logits_processor=leaving))
    gate.lift()
    completion = requests[0].result(60)
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == alone[1].token_ids[:3]


class Fussy:
    """A tokenizer that does not decode one token."""

    def __init__(self, token: int) -> None:
        self._inner, self._token = character_tokenizer(), token

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._inner(*arguments, **more)

    def decode(self, ids: list[int], **more: Any) -> str:
        if self._token in ids:
            raise LookupError(f"no text for {self._token}\nat all")
        return self._inner.decode(ids, **more)


def fussy_about(alone: Any, which: int) -> int:
    others = {t for i, c in enumerate(alone) if i != which for t in c.token_ids}
    return next(t for t in alone[which].token_ids if t not in others)


@pytest.mark.parametrize("reader", ["generate", "stop", "submit"])
def test_a_tokenizer_that_fails_ends_its_own_request(load: Load, alone: Any, reader: str) -> None:
    token = fussy_about(alone, 4)
    engine = load(tokenizer=Fussy(token))
    if reader == "submit":
        requests = [engine.submit(p, max_new_tokens=COUNT) for p in PROMPTS]
        found = [request.result(60) for request in requests]
        assert [t for d in requests[4] for t in d.token_ids] == found[4].token_ids
    else:
        settings = {"stop": "no such text"} if reader == "stop" else {}
        found = engine.generate(PROMPTS, max_new_tokens=COUNT, **settings)
    assert found[4].finish_reason == "error"
    assert found[4].error == f"its tokens do not decode: LookupError: no text for {token}"
    expected = alone[4].token_ids
    assert found[4].token_ids == (
        expected if reader == "generate" else expected[: expected.index(token) + 1]
    )
    for i, completion in enumerate(found):
        if i != 4:
            assert (completion.token_ids, completion.text) == (alone[i].token_ids, alone[i].text)


def test_a_tokenizer_that_fails_while_one_is_cancelled_harms_no_other(
    load: Load, alone: Any
) -> None:
    tokenizer = Fussy(-1)
    engine = load(tokenizer=tokenizer)
    gate = Gate(engine)
    requests = [engine.submit(PROMPTS[0], max_new_tokens=COUNT)]
    gate.inside()
    requests.append(engine.submit(PROMPTS[1], max_new_tokens=COUNT))
    gate.let()
    gate.let()
    sequence, commands = sequence_of(engine, requests[1]), engine._worker._commands
    with engine._worker._changed:  # fussy while it is cancelled, between two steps
        commands.append(lambda: setattr(tokenizer, "_token", sequence.new_tokens[-1]))
        requests[1].cancel()
        commands.append(lambda: setattr(tokenizer, "_token", -1))
    gate.lift()
    assert requests[0].result(60).text == alone[0].text
    completion = requests[1].result(60)
    assert completion.finish_reason == "error"
    assert "do not decode: LookupError" in completion.error
    assert completion.token_ids == alone[1].token_ids[:2]  # of steps 2 and 3
    settled(engine)
    assert engine.statistics().finished == {"error": 1, "length": 1}


def broken(*arguments: Any) -> torch.Tensor:
    raise RuntimeError("the kernel\nexploded")


def test_when_the_model_fails_every_waiter_hears_why_and_the_engine_works_again(
    load: Load, alone: Any
) -> None:
    engine = load(max_batch_size=3)
    good, gate = engine._loop.forward, Gate(engine)
    requests = [engine.submit(p, max_new_tokens=COUNT) for p in PROMPTS[:5]]
    gate.inside()
    gate.let()
    gated, engine._loop.forward = engine._loop.forward, broken
    requests += [engine.submit(p, max_new_tokens=COUNT) for p in PROMPTS[5:]]
    gate.lift()
    for request in requests:
        with pytest.raises(ExecutionError, match=r"RuntimeError: the kernel$") as caught:
            request.result(60)
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(ExecutionError, match="the kernel"):
            list(request)
        assert request.done
    assert gated
    settled(engine)
    figures = engine.statistics()
    assert (figures.running, figures.waiting, figures.cache.pages_used) == (0, 0, 0)
    health = engine.health()
    assert (health.alive, health.ready, health.stalled) == (True, True, False)
    assert health.failure == "RuntimeError: the kernel"
    engine._loop.forward = good
    found = engine.generate(PROMPTS, max_new_tokens=COUNT)
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    assert engine.health().failure is None


def test_what_came_during_the_step_that_failed_does_not_run_on_unread(engine: Engine) -> None:
    good, entered, go = engine._loop.forward, threading.Event(), threading.Event()

    def failing(inputs: Any) -> torch.Tensor:
        entered.set()
        assert go.wait(60)
        engine._loop.forward = good
        raise RuntimeError("once")

    engine._loop.forward = failing
    first = engine.submit(PROMPTS[0], max_new_tokens=COUNT)
    assert entered.wait(60)
    second = engine.submit(PROMPTS[1], max_new_tokens=COUNT)
    go.set()
    for request in (first, second):
        with pytest.raises(ExecutionError, match="once"):
            request.result(60)
    settled(engine)
    assert (engine.statistics().steps, engine.statistics().waiting) == (0, 0)


def test_samples_whose_first_one_was_lost_do_not_wait_for_it(load: Load) -> None:
    """The first reads the prompt for the others; here they are submitted after it has failed."""
    engine = load(max_batch_size=1, max_waiting=1)
    engine._loop.forward = broken
    with pytest.raises(ExecutionError, match="the kernel"):
        engine.generate(PROMPTS[0], num_return_sequences=4, temperature=1.0, max_new_tokens=2)
    settled(engine)
    assert engine.statistics().waiting == 0


def test_a_failure_while_memory_is_given_back_leaves_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine._loop.forward = broken

    def release(_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._loop.cache, "release", release)
        with pytest.raises(ExecutionError, match="the kernel"):
            engine.submit(PROMPTS[0]).result(60)
        settled(engine)
    assert "giving memory back failed too: MemoryError: no room" in caplog.text
    engine._loop.cache.release([*engine._loop.cache._running.values()])  # type: ignore[attr-defined]


def test_health_tells_ready_stalled_and_closed_apart(load: Load) -> None:
    engine = load(stall_after=0.01)
    idle = engine.health()
    assert (idle.alive, idle.ready, idle.stalled, idle.step_seconds) == (True, True, False, 0.0)
    assert idle.to_dict()["failure"] is None
    gate = Gate(engine)
    request = engine.submit(PROMPTS[0], max_new_tokens=2)
    gate.inside()
    time.sleep(0.02)
    stuck = engine.health()
    assert (stuck.alive, stuck.ready, stuck.stalled) == (True, False, True)
    assert stuck.step_seconds > 0.01
    gate.lift()
    request.result(60)
    settled(engine)
    assert engine.health() == idle
    engine.close()
    closed = engine.health()
    assert (closed.alive, closed.ready, closed.stalled) == (False, False, False)


def test_an_engine_closed_in_the_middle_of_a_step_is_stalled_and_not_alive(load: Load) -> None:
    engine = load(stall_after=0.001)
    gate = Gate(engine)
    request = engine.submit(PROMPTS[0])
    gate.inside()
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(UsageError, match="closed"):
        request.result(60)
    time.sleep(0.002)
    health = engine.health()
    assert (health.alive, health.ready, health.stalled) == (False, False, True)
    gate.lift()
    closing.join(60)
    assert not engine.health().stalled


def test_a_thread_that_cannot_start_harms_nobody_after_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jackfield.load(model) as engine:
        with monkeypatch.context() as patch:

            def full(_: Any) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", full)
            with pytest.raises(ExecutionError, match="no thread can be started"):
                engine.submit(PROMPTS[0], max_new_tokens=2)
        assert engine.health().alive
        assert len(engine.submit(PROMPTS[0], max_new_tokens=2).result(60).token_ids) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_an_engine_in_a_forked_child_says_so(model: Any) -> None:
    with jackfield.load(model) as engine:
        engine.generate(PROMPTS[0], max_new_tokens=2)
        child = os.fork()
        if not child:
            try:
                engine.submit(PROMPTS[0])
            except UsageError as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(engine.generate(PROMPTS[0], max_new_tokens=2)[0].token_ids) == 2


async def awaited(request: Any) -> Any:
    return await request


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize(
    "wait",
    [lambda r: r.result(), list, lambda r: asyncio.run(awaited(r))],
    ids=["result", "iteration", "await"],
)
def test_an_old_request_in_a_forked_child_says_so(model: Any, wait: Any) -> None:
    with jackfield.load(model) as engine:
        slow = {"logits_processor": lambda ids, scores: time.sleep(0.05) or scores}
        request = engine.submit(PROMPTS[0], max_new_tokens=100, eos_token_id=[], **slow)
        child = os.fork()
        if not child:
            signal.alarm(20)  # where it waits for ever
            try:
                wait(request)
            except UsageError as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        request.cancel()


def test_an_engine_lives_as_long_as_its_requests() -> None:
    request = jackfield.load(build("llama")).submit(PROMPTS[0], max_new_tokens=30)
    gc.collect()
    assert len(request.result(60).token_ids) == 30


def test_samples_have_a_reader_each(engine: Engine) -> None:
    asked = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 2}
    together = engine.generate(["One day"], num_return_sequences=3, **asked)
    requests = engine.submit_samples("One day", num_return_sequences=3, **asked)
    for request, right in zip(requests, together, strict=True):
        deltas = list(request)
        assert [t for d in deltas for t in d.token_ids] == right.token_ids
        assert [p for d in deltas for p in d.logprobs] == right.logprobs
        assert "".join(d.text for d in deltas) == right.text
    with pytest.raises(UsageError, match="one prompt"):
        engine.submit_samples(["One", "two"])


def test_samples_start_all_or_none(load: Load) -> None:
    with load(max_waiting=2, max_batch_size=1) as engine:
        hold = engine.submit("One", max_new_tokens=120)
        next(iter(hold))
        waits = engine.submit("Two", max_new_tokens=2)
        with pytest.raises(QueueFullError):
            engine.submit_samples("Three", num_return_sequences=2, temperature=1.0)
        assert engine.statistics().waiting == 1
        hold.cancel()
        assert waits.result().finish_reason == "length"
