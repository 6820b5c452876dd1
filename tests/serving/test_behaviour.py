"""What becomes of requests when clients leave, queues fill, steps raise or hang, models fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from served import Served, serving

import jackfield
from jackfield.bridge.tokenizer import Text
from jackfield.engine import closing
from jackfield.errors import RanksError, UsageError
from jackfield.serving import pool

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

CHAT = "/v1/chat/completions"
LONG = 400


def body(text: str = "Tell me", most: int = LONG, **more: Any) -> dict[str, Any]:
    """A request that goes on until `most`: nothing ends a text before."""
    return {
        "model": "demo", "prompt": text, "max_tokens": most, "logit_bias": {"0": -100, "1": -100},
        **more,
    }  # fmt: skip


def ask(served: Served, **more: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/completions", json=body(**more), timeout=60)


def until(true: Callable[[], Any], within: float = 10.0) -> None:
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


class Faults:
    """Engines whose next step does as `act` says, after `good` steps that are as always."""

    def __init__(self) -> None:
        self.loaded: list[Engine] = []
        self.good, self.act = 0, lambda: None
        self.held = threading.Event()  # what a step that hangs waits for

    def load(self, *given: Any, **arguments: Any) -> Engine:
        engine = jackfield.load(*given, **arguments)
        self.loaded.append(engine)
        engine.model.register_forward_pre_hook(lambda *_: self._before())
        return engine

    def _before(self) -> None:
        self.good -= 1
        if self.good < 0:
            act, self.act = self.act, lambda: None
            act()

    def hang(self) -> None:
        self.held.wait(60)

    def fail(self) -> None:
        raise RuntimeError("the kernel is broken")


@pytest.fixture
def faults() -> Iterator[Faults]:
    made = Faults()
    yield made
    made.held.set()


@pytest.fixture(scope="module")
def calm() -> Iterator[Served]:
    """A server with a short queue of its own, whose requests must all be gone in the end."""
    with serving(models={"demo": {"model": "demo", "max_batch_size": 2}}, max_waiting=2) as found:
        yield found


def nothing_left(served: Served) -> None:
    """No request, page, lease, task or reader is left of what was asked."""

    async def tasks() -> list[str]:
        return [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    def clean() -> bool:
        seen = served.engine.statistics()
        (model,) = served.pool.models.values()
        used = seen.cache.pages_used if seen.cache else 0
        # beside the server itself and its lifespan
        left = asyncio.run_coroutine_threadsafe(tasks(), served.loop).result(5)
        others = [name for name in left if "jackfield" not in name]
        return not (seen.running or seen.waiting or used or model.in_use or len(others) > 2)

    until(clean)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


@contextlib.contextmanager
def paused(served: Served) -> Iterator[None]:
    """The next step waits until the block is left."""
    gate = threading.Event()

    def wait(*_: Any) -> None:
        gate.wait(30)

    handle = served.engine.model.register_forward_pre_hook(wait)
    try:
        yield
    finally:
        gate.set()
        handle.remove()


@contextlib.contextmanager
def open_streams(served: Served, count: int, **more: Any) -> Iterator[list[httpx.Response]]:
    """Streams of which something has come."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))
        yield [
            stack.enter_context(
                client.stream(
                    "POST", f"{served.url}/v1/completions", json=body(stream=True, **more)
                )
            )
            for _ in range(count)
        ]


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ended(answer: httpx.Response) -> str:
    """Why its only text ended."""
    (choice,) = events(answer)[-1]["choices"]
    reason: str = choice["finish_reason"]
    return reason


def test_a_full_queue_is_429_and_says_when_to_come_again(calm: Served) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(paused(calm))
        stack.enter_context(open_streams(calm, 1))
        until(lambda: calm.engine.statistics().running == 1)
        stack.enter_context(open_streams(calm, 2))
        until(lambda: calm.engine.statistics().waiting == 2)
        answer = ask(calm, most=1)
        assert answer.status_code == 429
        assert error_of(answer)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        ready = httpx.get(f"{calm.url}/health/ready")
        assert ready.status_code == 503
        assert "queue is full" in ready.json()["reason"]
    nothing_left(calm)
    assert ask(calm, most=1).status_code == 200
    assert httpx.get(f"{calm.url}/health/ready").status_code == 200


@pytest.mark.parametrize("more", [{"most": 100_000}, {"text": "word " * 5000, "most": 1}])
def test_what_is_longer_than_the_context_is_400(calm: Served, more: dict[str, Any]) -> None:
    answer = ask(calm, **more)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("max_tokens" if more["most"] > 1 else "prompt")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["reading", "queue", "prefill", "decode", "many"])
def test_nothing_is_left_of_a_client_that_goes(
    calm: Served, stream: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client hangs up while its prompt is read, in the queue, before and after its first token;
    with several texts, too, whose pieces fill the queue between them.
    """
    with contextlib.ExitStack() as stack:
        reading = threading.Event()
        if where == "reading":
            submit = calm.engine.submit_samples

            def slowly(*given: Any, **asked: Any) -> Any:
                reading.set()
                time.sleep(0.2)
                return submit(*given, **asked)

            monkeypatch.setattr(calm.engine, "submit_samples", slowly)
        if where == "queue":
            stack.enter_context(open_streams(calm, 2))
        asked = body("word " * 80 if where == "prefill" else "One", stream=stream)
        if where == "many":
            asked["n"] = 2
        before = calm.engine.statistics()
        with contextlib.suppress(httpx.TimeoutException), httpx.Client() as client:
            patience = {"reading": 0.1, "prefill": 0.02}.get(where, 0.15)
            if stream and where == "decode":
                with client.stream("POST", f"{calm.url}/v1/completions", json=asked) as answer:
                    next(answer.iter_lines())
            else:
                url = f"{calm.url}/v1/completions"
                client.post(url, json=asked, timeout=httpx.Timeout(10, read=patience))
        if where == "reading":
            assert reading.is_set()
        if where == "queue":
            until(lambda: calm.engine.statistics().waiting == 0)
    nothing_left(calm)
    made = sum(calm.engine.statistics().finished.values()) - sum(before.finished.values())
    assert calm.engine.statistics().finished.get("length") == before.finished.get("length")
    assert made <= 4


def test_a_client_frees_its_pages_within_a_step(calm: Served) -> None:
    with open_streams(calm, 1, text="two words") as (answer,):
        lines = answer.iter_lines()  # hangs up when it is forgotten
        next(lines)
        engine = calm.engine
        (request,) = [r for _, r in engine._worker._open.values()]
        cancelled: list[int] = []
        cancel = request._cancel
        request._cancel = lambda r: (cancelled.append(engine.statistics().steps), cancel(r))
    until(lambda: request.done)
    assert engine.statistics().steps <= cancelled[0] + 1
    assert request.result().finish_reason == "cancelled"


def test_a_step_that_raises_is_told_to_all_and_is_over(faults: Faults) -> None:
    with serving(faults.load, models={"demo": {"model": "demo", "max_batch_size": 2}}) as served:
        faults.good = 100_000
        found: list[httpx.Response] = []
        asker = threading.Thread(target=lambda: found.append(ask(served)))
        with open_streams(served, 2) as streams:
            until(lambda: served.engine.statistics().running == 2)  # and none of them waits
            with paused(served):
                asker.start()
                until(lambda: served.engine.statistics().waiting == 1)
                faults.good, faults.act = 10, faults.fail
            told = [events(stream)[-1] for stream in streams]
        asker.join()
        for error in (error["error"] for error in [*told, found[0].json()]):
            assert "the kernel is broken" in error["message"]
            assert error["code"] == "engine_failed"
        assert found[0].status_code == 500
        nothing_left(served)
        assert ask(served, most=2).status_code == 200
        assert len(faults.loaded) == 1
        assert httpx.get(f"{served.url}/health/ready").status_code == 200


def test_a_step_that_hangs_is_told_and_the_model_is_loaded_again_within_bounds(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing, "CLOSE_WITHIN", 0.4)
    monkeypatch.setattr(pool, "WATCH_EVERY", 0.02)
    with serving(faults.load, stall_after=0.3, restarts=1) as served:
        (model,) = served.pool.models.values()
        for turn in range(2):
            faults.good, faults.act = 10, faults.hang
            found: list[httpx.Response] = []
            asker = threading.Thread(target=lambda: found.append(ask(served)))  # noqa: B023
            with open_streams(served, 2) as streams:
                asker.start()
                until(lambda: model.engine is None)
                ready = httpx.get(f"{served.url}/health/ready")
                assert ready.status_code == 503
                assert "a step hangs in" in ready.json()["reason"]
                told = [events(stream)[-1] for stream in streams]
            asker.join()
            assert found[0].status_code == 503
            for error in (error["error"] for error in [*told, found[0].json()]):
                assert "a step hangs in" in error["message"]
                assert error["code"] == "engine_failed"
            if turn == 0:
                assert ask(served, most=2).status_code == 200  # waits for the new one
                assert httpx.get(f"{served.url}/health/ready").status_code == 200
        answer = ask(served, most=2)
        assert answer.status_code == 503
        assert "a step hangs in" in error_of(answer)["message"]
        assert httpx.get(f"{served.url}/health/ready").status_code == 503
        assert httpx.get(f"{served.url}/health/live").status_code == 200
        assert len(faults.loaded) == 2
        faults.held.set()
    assert "a step hangs in" in caplog.text


def test_an_engine_that_closes_itself_is_loaded_again(faults: Faults) -> None:
    """As one does whose model was shared with a process that has ended."""

    def gone() -> None:
        raise RanksError("rank 1 of the 2 processes of this model has ended")

    with serving(faults.load, restarts=1) as served:
        faults.good, faults.act = 3, gone
        answer = ask(served)
        assert answer.status_code >= 500
        assert "rank 1 of the 2 processes" in error_of(answer)["message"]
        assert ask(served, most=2).status_code == 200  # waits for the new one
        assert [engine.closed for engine in faults.loaded] == [True, False]
        assert httpx.get(f"{served.url}/health/ready").status_code == 200


@pytest.mark.parametrize("error", [UsageError("no such folder"), OSError("disk")])
def test_a_model_that_cannot_be_loaded_is_503_once_for_all_that_wait(error: Exception) -> None:
    attempts = []

    def load(*_: Any, **__: Any) -> Engine:
        attempts.append(1)
        time.sleep(0.2)
        raise error

    with serving(load, preload=False) as served:
        assert httpx.get(f"{served.url}/health/ready").status_code == 200
        found: list[httpx.Response] = []
        askers = [threading.Thread(target=lambda: found.append(ask(served))) for _ in range(5)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        found.append(ask(served))
        assert [answer.status_code for answer in found] == [503] * 6
        assert all(str(error) in error_of(answer)["message"] for answer in found)
        assert int(found[-1].headers["retry-after"]) >= 5
        assert len(attempts) == 1
        assert httpx.get(f"{served.url}/health/ready").status_code == 503


def test_a_model_without_a_tokenizer_is_refused() -> None:
    def load(source: Any, **given: Any) -> Engine:
        engine = jackfield.load(source, **given)
        engine.tokenizer = None
        engines.append(engine)
        return engine

    engines: list[Engine] = []
    with serving(load, preload=False) as served:
        answer = ask(served)
        assert answer.status_code == 503
        assert (
            "demo has no tokenizer, and a server answers with text" in error_of(answer)["message"]
        )
    assert all(engine.closed for engine in engines)


def test_a_seed_of_minus_one_is_any(calm: Served) -> None:
    texts = {
        ask(calm, seed=-1, temperature=2.0, most=12).json()["choices"][0]["text"] for _ in range(4)
    }
    assert len(texts) > 1


def test_a_client_that_goes_during_a_load_takes_nobody_s_model() -> None:
    loads = []

    def load(*given: Any, **arguments: Any) -> Engine:
        loads.append(given)
        time.sleep(0.3)
        return jackfield.load(*given, **arguments)

    with serving(load, preload=False) as served:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{served.url}/v1/completions", json=body(), timeout=0.1)
        assert ask(served, most=2).status_code == 200
        nothing_left(served)
    assert len(loads) == 1


TWO = {"a": {"model": "demo"}, "b": {"model": "demo", "max_batch_size": 1}}


def test_models_that_idle_are_unloaded_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WATCH_EVERY", 0.02)
    closing = threading.Event()

    def load(*given: Any, **arguments: Any) -> Engine:
        engine = jackfield.load(*given, **arguments)
        close = engine.close

        def slowly() -> None:
            closing.set()
            time.sleep(0.2)
            close()

        monkeypatch.setattr(engine, "close", slowly)
        return engine

    with serving(load, models=TWO, preload=False, model_timeout=0.3) as served:
        a, b = served.pool.models.values()
        right = ask(served, model="a", most=4).json()["choices"]
        assert (a.state, b.state) == ("ready", "cold")
        with open_streams(served, 1, model="b", most=60) as streams:
            assert closing.wait(5)  # a goes; b, which is in use, stays
            assert ask(served, model="a", most=4).json()["choices"] == right
            assert ended(*streams) == "length"
        until(lambda: a.state == b.state == "cold")
        assert httpx.get(f"{served.url}/health/ready").status_code == 200
        shown = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert [one["state"] for one in shown] == ["cold", "cold"]


def test_a_deadline_ends_a_request_in_the_queue_and_one_that_runs() -> None:
    one = {"demo": {"model": "demo", "max_batch_size": 1}}
    with serving(models=one, deadline=0.3) as served, open_streams(served, 2) as streams:
        told = [events(stream)[-1]["error"] for stream in streams]
        assert [error["code"] for error in told] == ["deadline"] * 2
        assert ask(served).status_code == 504
        nothing_left(served)


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 0, "echo": True}])
def test_a_deadline_passes_between_prompts(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is made of them: no further prompt is read."""
    with serving(deadline=0.3) as served:
        read: list[Any] = []
        own = Text.encode

        def slowly(text: Text, prompt: Any, *given: Any) -> Any:
            read.append(prompt)
            time.sleep(0.4)
            return own(text, prompt, *given)

        monkeypatch.setattr(Text, "encode", slowly)
        answer = ask(served, prompt=["One", "two", "three"], **asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (504, "deadline")
        assert error["message"] == "its deadline of 0.3 s passed while it was read"
        assert read == ["One"]
        nothing_left(served)


def test_two_servers_know_nothing_of_each_other(calm: Served) -> None:
    with serving(default_seed=1) as other:
        before = calm.engine.statistics().tokens_out
        assert ask(other, most=3).status_code == 200
        assert calm.engine.statistics().tokens_out == before
        counted = httpx.get(f"{other.url}/metrics").text
        assert 'endpoint="/v1/completions",model="demo",status="200"} 1.0' in counted
    assert ask(calm, most=3).status_code == 200


def test_a_server_that_ends_lets_streams_end() -> None:
    before = {t.name for t in threading.enumerate()}
    with serving() as served:
        with open_streams(served, 3, most=100) as streams:
            served.server.should_exit = True
            assert [ended(stream) for stream in streams] == ["length"] * 3
        until(lambda: served.pool.models["demo"].engine is None)
    left = {t.name for t in threading.enumerate()} - before
    assert not [name for name in left if name in ("server", "jackfield")]


def test_a_server_that_may_wait_no_longer_cuts_streams_off() -> None:
    with serving(drain=1.0, models={"demo": {"model": "demo", "max_batch_size": 1}}) as served:
        slow = served.engine.model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        with open_streams(served, 2) as streams:
            served.server.should_exit = True
            for stream in streams:
                with pytest.raises(httpx.RemoteProtocolError):
                    events(stream)
        slow.remove()
