"""What a step costs its readers: one wake-up an event loop, reports when read, bounded backlogs."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from driven import Gate
from families import build, character_tokenizer, prompts
from hypothesis import given
from hypothesis import strategies as st

import jackfield
from jackfield.bridge.tokenizer import Text
from jackfield.contracts import TokenLogprob
from jackfield.engine import report, requests
from jackfield.engine.completions import Delta
from jackfield.engine.engine import Engine
from jackfield.engine.observer import Observer
from jackfield.engine.requests import BACKLOG, Request
from jackfield.errors import ExecutionError, PromptError

READERS = 6
COUNT = 12
PROMPTS = prompts((3,) * READERS)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with jackfield.load(
        build("llama"), tokenizer=character_tokenizer(), cache_implementation="paged"
    ) as loaded:
        yield loaded


def test_a_step_wakes_an_event_loop_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests are read in it; and each loop of several threads."""
    woken: Counter[int] = Counter()
    tokens: dict[int, list[list[int]]] = {}

    async def read_all() -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(act: Any, *given: Any) -> Any:
            if act is requests._set:
                woken[id(loop)] += 1
            return call(act, *given)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        async def read(prompt: list[int]) -> list[int]:
            request = engine.submit(prompt, max_new_tokens=COUNT, min_new_tokens=COUNT)
            return [token async for delta in request for token in delta.token_ids]

        tokens[id(loop)] = await asyncio.gather(*map(read, PROMPTS))

    threads = [threading.Thread(target=lambda: asyncio.run(read_all())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=COUNT)]
    assert len(tokens) == 2
    assert all(found == expected for found in tokens.values())
    steps = engine.statistics().steps
    assert all(0 < times <= steps for times in woken.values()), (woken, steps)


def test_all_are_woken_where_what_one_reads_cannot_be_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that fails has told some already, who wait in an event loop."""
    made = Observer.delta
    wrong = []

    def fails(self: Observer, event: Any) -> Delta:
        if len(event.sequence.new_tokens) == 3 and event.sequence.id in wrong:
            raise RuntimeError("no delta")
        return made(self, event)

    monkeypatch.setattr(engine._worker, "_deltas", lambda event: fails(observer, event))
    observer = engine._assembly.observer

    async def read_all() -> list[Any]:
        found = [engine.submit(prompt, max_new_tokens=COUNT) for prompt in PROMPTS[:3]]
        wrong.append(found[1].id)
        return await asyncio.wait_for(asyncio.gather(*found, return_exceptions=True), 60)

    found = asyncio.run(read_all())
    assert [type(one).__name__ for one in found] == ["ExecutionError"] * 3


@pytest.mark.parametrize("way", ["asubmit", "astream"])
def test_a_prompt_is_read_while_its_event_loop_goes_on(
    engine: Engine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read to its end when another task of the same loop has run; errors come out there."""
    gone_on, encode = threading.Event(), Text.encode

    def slow(self: Text, *given: Any) -> list[int]:
        assert gone_on.wait(30), "the event loop stands still"
        return encode(self, *given)

    monkeypatch.setattr(Text, "encode", slow)

    async def ask(prompt: Any) -> list[int]:
        if way == "asubmit":
            return (await (await engine.asubmit(prompt, max_new_tokens=COUNT))).token_ids
        found = [delta async for delta in engine.astream(prompt, max_new_tokens=COUNT)]
        return [token for delta in found for token in delta.token_ids]

    async def both() -> list[Any]:
        asked = [asyncio.ensure_future(ask(prompt)) for prompt in (PROMPTS[0], [10**9])]
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in asked)
        gone_on.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    found, refused = asyncio.run(both())
    assert found == engine.generate(PROMPTS[0], max_new_tokens=COUNT)[0].token_ids
    assert isinstance(refused, PromptError)
    assert engine.statistics().finished == {"length": 2}


def test_other_threads_run_while_a_long_prompt_is_read() -> None:
    """The tokenizer of the demo model, which is of the fast kind: it works without the GIL."""
    turns = []
    with jackfield.load("demo") as engine:
        text = engine._assembly.text
        long = "Once upon a time there was a little dog. " * 4000
        thread = threading.Thread(target=lambda: text.encode(long))
        thread.start()
        while thread.is_alive():
            text.decode([5, 6, 7])
            turns.append(1)
            thread.join(0.001)
    assert len(turns) > 10


def test_an_event_loop_that_was_closed_keeps_nobody_from_being_woken() -> None:
    gone, here = asyncio.new_event_loop(), asyncio.new_event_loop()
    gone.close()
    wakers = [requests.Waker(loop) for loop in (gone, here, here)]
    woken = [waker.woken for waker in wakers]
    requests.wake(wakers)
    here.run_until_complete(asyncio.wait_for(woken[1].wait(), 10))
    assert [one.is_set() for one in woken] == [False, True, True]
    here.close()


def test_a_report_is_made_when_it_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had run is noted once between two steps, whoever comes and ends there."""
    noted, compared = [], []
    full, since = Observer.report, report.Report.since
    monkeypatch.setattr(Observer, "report", lambda self: (noted.append(1), full(self))[1])
    monkeypatch.setattr(
        report.Report, "since", lambda self, before: (compared.append(1), since(self, before))[1]
    )
    engine.generate(PROMPTS[0], max_new_tokens=2)
    noted.clear()
    gate = Gate(engine)
    found = [engine.submit(prompt, max_new_tokens=4) for prompt in PROMPTS]
    gate.lift()
    completions = [request.result(60) for request in found]
    assert len(noted) <= 4  # where the first came, the others, and where they ended
    assert compared == []
    reports = [completion.report for completion in completions]
    assert len(compared) == READERS
    assert [id(completion.report) for completion in completions] == list(map(id, reports))
    assert len(compared) == READERS


def test_a_report_is_of_what_ran_since_the_request_came(engine: Engine) -> None:
    first = engine.generate(PROMPTS[0], max_new_tokens=5)[0]
    second = engine.generate(PROMPTS[1], max_new_tokens=9)[0]
    third = engine.generate(PROMPTS[2], max_new_tokens=1)[0]
    assert [c.report["cache"].calls for c in (third, first, second)] == [1, 5, 9]
    assert sum(first.report["attention"].decode.values()) * 2 == sum(
        second.report["attention"].decode.values()
    )
    assert first.report["decoding"].calls == 5
    assert engine.report()["cache"].calls == 15
    assert first.to_dict()["report"] == first.report.to_dict()


@pytest.mark.parametrize("read", [True, False])
def test_a_completion_is_copied_with_its_report(engine: Engine, read: bool) -> None:
    completion = engine.generate(PROMPTS[0], max_new_tokens=5)[0]
    if read:
        assert completion.report["cache"].calls == 5
    for found in (copy.deepcopy(completion), pickle.loads(pickle.dumps(completion))):  # noqa: S301
        assert found == completion
        assert found.report == completion.report


def deltas(count: int) -> list[Delta]:
    def logprobs(number: int) -> list[TokenLogprob]:
        return [TokenLogprob(number, -1.0, ()), TokenLogprob(number, -2.0, ())]

    return [Delta(chr(97 + n % 26), [n, n + 1], None, logprobs(n)) for n in range(count)]


@given(st.lists(st.integers(0, 100), max_size=12), st.booleans())
def test_a_backlog_is_bounded_and_nothing_is_lost(reads: list[int], ends: bool) -> None:
    """Read some after each hundred steps: what is read is what came, in that order."""
    request = Request(1, lambda _: None, streams=True)
    made = deltas(100 * len(reads))
    came, found = iter(made), []
    for count in reads:
        for _ in range(100):
            request.deliver(next(came))
            assert len(request._deltas) <= BACKLOG
        found += [request._next() for _ in range(min(count, len(request._deltas)))]
    end: Any = object()
    request.deliver(Delta("", [], end if ends else None))
    found += [request._next() for _ in range(len(request._deltas))]
    whole = Delta.merged([delta for delta in found if delta is not None])
    assert whole == Delta.merged([*made, Delta("", [], end if ends else None)])
    assert len(found) <= len(made) + 1
    assert all(delta is not None and delta.completion is None for delta in found[:-1])


def test_a_reader_who_keeps_up_gets_a_delta_a_step() -> None:
    request = Request(1, lambda _: None, streams=True)
    made = deltas(3 * BACKLOG)
    for delta in made:
        request.deliver(delta)
        assert request._next() is delta


def test_a_slow_reader_gets_few_deltas_and_the_same_text(engine: Engine) -> None:
    asked: dict[str, Any] = {"max_new_tokens": BACKLOG + 50, "logprobs": 1, "eos_token_id": None}
    request = engine.submit(PROMPTS[0], **asked)
    completion = request.result(60)
    found = list(request)
    assert len(found) <= BACKLOG
    assert "".join(delta.text for delta in found) == completion.text
    assert [token for delta in found for token in delta.token_ids] == completion.token_ids
    assert [one for delta in found for one in delta.logprobs] == completion.logprobs
    assert [delta.completion for delta in found] == [None] * (len(found) - 1) + [completion]


def test_who_waits_for_the_end_sleeps_until_then() -> None:
    """Waking a thread with every token costs the step that makes them more than the tokens do."""
    looks: list[str] = []

    class Watched(Request):
        @property
        def done(self) -> bool:
            looks.append(threading.current_thread().name)
            return super().done

    request, found = Watched(0, lambda _: None, streams=True), []
    waiter = threading.Thread(target=lambda: found.append(request.result(60)), name="waiter")
    waiter.start()
    while "waiter" not in looks:
        time.sleep(0.001)
    for delta in deltas(50):
        request.deliver(delta)
        time.sleep(0.0005)  # so that whoever was woken looks
    end: Any = object()
    request.deliver(Delta("", [], end))
    waiter.join(60)
    assert found == [end]
    assert looks.count("waiter") <= 4


def open_request() -> Request:
    return Request(0, lambda request: None, streams=True)


def told(request: Request, text: str, completion: Any = None) -> None:
    requests.wake(request.deliver(Delta(text, [1], completion)))


@pytest.mark.parametrize("merged", [True, False])
def test_a_paced_reader_is_woken_for_the_first_and_for_the_end(merged: bool) -> None:
    """The interval is longer than the test may take; what comes in it is handed out at the end."""
    request, end = open_request(), SimpleNamespace(finish_reason="stop")
    found: list[str] = []

    async def read() -> None:
        async for delta in request.paced(3600.0, merged=merged):
            found.append(delta.text)  # noqa: PERF401 - looked at meanwhile

    async def act() -> None:
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        told(request, "a")
        while not found:
            await asyncio.sleep(0)
        for text in "bcd":
            told(request, text)
            await asyncio.sleep(0.01)
        assert found == ["a"]
        told(request, "e", end)
        await asyncio.wait_for(reader, 60)

    asyncio.run(act())
    assert found == (["a", "bcde"] if merged else list("abcde"))
    assert request._wakers == []


def test_a_paced_reader_looks_when_the_interval_is_over() -> None:
    request = open_request()

    async def act() -> None:
        paced = aiter(request.paced(0.05, merged=True))
        told(request, "a")
        assert (await anext(paced)).text == "a"
        began = asyncio.get_running_loop().time()
        waits = asyncio.ensure_future(anext(paced))
        await asyncio.sleep(0)
        told(request, "b")
        told(request, "c")
        assert (await asyncio.wait_for(waits, 60)).text == "bc"
        assert asyncio.get_running_loop().time() - began >= 0.045
        requests.wake(request.fail(ValueError("no")))
        with pytest.raises(ExecutionError, match="no"):
            await asyncio.wait_for(anext(paced), 60)

    asyncio.run(act())
