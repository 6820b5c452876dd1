"""Loads against a server whose delays are known, and what figures make of times."""

from __future__ import annotations

import asyncio
import random
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy
import pytest
from fakes import DONE, END, HEAD, Fake, Script, Step, chunk, counted, event, plain, said

from jackfield.client.address import Address
from jackfield.client.figures import Bounds, Figures, figures, spread
from jackfield.client.load import Arrivals, Outcome, run
from jackfield.client.timing import Timed
from jackfield.client.wire import Reply, Wires

Start = Callable[[Script], Fake]


def answers(first: float = 0.0, later: float = 0.0, tokens: int = 3) -> list[Step]:
    more: list[Step] = [step for n in range(tokens - 1) for step in (later, said(f" {n}"))]
    return [HEAD, first, said("a"), *more, counted(7, tokens), DONE, END]


def loaded(url: str, arrivals: Arrivals, timeout: float = 30.0) -> Outcome:
    async def act() -> Outcome:
        with closing(Wires(Address.of(url), "/chat/completions", timeout)) as wires:
            return await run(wires, arrivals, lambda n: b'{"number": %d}' % n)

    return asyncio.run(act())


def test_percentiles_are_numpys() -> None:
    chance = random.Random(0)
    for count in (1, 2, 3, 10, 101):
        values = [chance.random() for _ in range(count)]
        found = spread(values)
        assert found is not None
        right = [numpy.percentile(values, share) for share in (50, 95, 99, 100)]
        assert list(found.values()) == pytest.approx(right, abs=1e-12)
    assert spread([]) is None


def reply(*pieces: tuple[float, bytes]) -> Reply:
    """As from the parser: bodies without the marks of chunks."""
    return Reply(200, [(at, data.split(b"\r\n", 1)[1][:-2]) for at, data in pieces])


def test_times_are_those_of_the_last_bytes_of_events() -> None:
    timed = Timed(due=10.0)
    whole = said("b").split(b"\r\n", 1)[1][:-2]
    pieces = reply((10.2, event(choices=[{"delta": {"role": "assistant", "content": ""}}])),
                   (10.5, said("a")), (10.6, chunk(whole[:9])), (10.9, chunk(whole[9:])),
                   (11.1, said("c")), (11.2, counted(5, 9)), (11.3, DONE))  # fmt: skip
    timed.read(pieces)
    timed.ended = 11.3
    assert timed.error is None
    assert (timed.text, timed.tokens, timed.prompt_tokens) == ("abc", 9, 5)
    assert timed.to_first == pytest.approx(0.5)
    assert timed.per_token == pytest.approx(0.6 / 8)
    assert list(timed.gaps) == pytest.approx([0.4, 0.2])
    assert timed.whole == pytest.approx(1.3)
    outcome = Outcome(Arrivals(1, None, 1, None), [timed], 2.0, 0.5)
    found = figures(outcome, Bounds(to_first=0.5 + 1e-9, per_token=0.075 + 1e-9))
    assert (found.requests_per_second, found.goodput) == (0.5, 0.5)
    assert (found.tokens_per_second, found.client_share) == (4.5, 0.25)
    assert figures(outcome, Bounds(to_first=0.49)).goodput == 0
    assert figures(outcome, Bounds(per_token=0.074)).goodput == 0


def test_without_usage_pieces_are_counted(fake: Start) -> None:
    server = fake(lambda path, body: [HEAD, said("a"), said("b", "stop"), DONE, END])
    found = figures(loaded(server.url, Arrivals(1, None, 2, None)), Bounds())
    assert (found.tokens, found.counted, found.failed) == (4, False, 0)


def test_delays_of_a_server_are_found(fake: Start) -> None:
    """No upper bounds: a busy machine may take any time, and may bring two pieces at once."""
    slow = 3  # every tenth request is slow to begin
    server = fake(lambda path, body: answers(0.4 if body["number"] % 10 == slow else 0.02, 0.01))
    outcome = loaded(server.url, Arrivals(5, None, 30, None))
    found = figures(outcome, Bounds(to_first=0.39))
    assert (found.requests, found.failed, found.tokens, found.counted) == (30, 0, 90, True)
    assert found.time_to_first_token is not None
    assert found.time_to_first_token["p50"] >= 0.02
    assert found.time_to_first_token["p95"] >= 0.4
    assert all(one.whole >= 0.02 + 2 * 0.01 for one in outcome.timed)
    assert found.goodput <= 27 / found.seconds
    assert found.prompt_tokens == {"p50": 7, "p95": 7, "p99": 7, "max": 7}


@pytest.mark.parametrize("clients", [1, 4])
def test_a_closed_loop_has_so_many_open(fake: Start, clients: int) -> None:
    server = fake(lambda path, body: answers(0.02 if clients == 1 else 0.3))
    outcome = loaded(server.url, Arrivals(clients, None, 12, None))
    assert server.most == clients
    assert sorted(body["number"] for body in server.bodies) == list(range(12))
    assert len(outcome.timed) == 12


def test_a_duration_ends_a_loop_and_what_is_open_is_finished(fake: Start) -> None:
    server = fake(lambda path, body: answers(0.05))
    outcome = loaded(server.url, Arrivals(2, None, None, 0.2))
    assert 2 <= len(outcome.timed) <= 10
    assert all(one.error is None and one.due - outcome.timed[0].due < 1 for one in outcome.timed)
    assert loaded(server.url, Arrivals(None, 30.0, None, 0.2)).seconds >= 0.05


def test_arrivals_are_poissons_and_wait_for_nobody(fake: Start) -> None:
    server = fake(lambda path, body: answers(0.3))
    outcome = loaded(server.url, Arrivals(None, 100.0, 20, None, seed=4))
    chance = random.Random(4)
    right = [chance.expovariate(100.0) for _ in range(19)]
    dues = sorted(one.due for one in outcome.timed)
    assert numpy.diff(dues) == pytest.approx(right)
    assert server.most > 5
    assert all(one.sent >= one.due for one in outcome.timed)


def test_times_count_from_when_a_request_was_due() -> None:
    timed = Timed(due=1.0, sent=3.0)
    timed.read(reply((4.0, said("a")), (4.0, DONE)))
    assert timed.to_first == 3.0
    assert figures(Outcome(Arrivals(1, None, 1, None), [timed], 1, 0), Bounds()).late == 2.0


AT_ONCE: dict[str, list[Step]] = {
    "a token, and its end": [said("a", "length"), counted(3, 1)],
    "the end alone": [said("", "stop"), counted(3, 1)],
    "the end after its role": [event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
                               said("", "stop"), counted(3, 1)],
    "tokens without a text": [said("", "length"), counted(3, 2)],
    "not counted": [said("", "stop")],
    "of a text completion": [event(choices=[{"index": 0, "text": "", "finish_reason": "stop"}])],
}  # fmt: skip


@pytest.mark.parametrize("kind", AT_ONCE)
def test_an_answer_that_ends_at_once_is_an_answer(fake: Start, kind: str) -> None:
    steps = [HEAD, 0.05, *AT_ONCE[kind], 0.05, DONE, END]
    outcome = loaded(fake(lambda *_: steps).url, Arrivals(1, None, 1, None))
    found = figures(outcome, Bounds(to_first=10, per_token=1e-9))
    assert (found.failed, found.errors) == (0, {})
    assert found.goodput == found.requests_per_second
    assert found.time_to_first_token is not None
    assert 0.05 <= found.time_to_first_token["p50"] < outcome.timed[0].whole - 0.04
    assert (found.time_per_token, found.gap) == (None, None)
    assert found.tokens == (2 if kind == "tokens without a text" else 1)


FAILURES: dict[str, list[Step]] = {
    "429 queue_full": plain("429 Too Many", {"error": {"message": "m", "code": "queue_full"}}),
    "500": plain("500 Oh", b"oh", "text/plain"),
    "cut off": [HEAD, said("a"), b""],
    "error in the stream": [HEAD, said("a"), event(error={"message": "m"}), DONE, END],
    "no text": [HEAD, DONE, END],
    "timeout": [HEAD, 30.0],
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_counted_by_kind(fake: Start, kind: str) -> None:
    def script(path: str, body: dict[str, Any]) -> list[Step]:
        return FAILURES[kind] if body["number"] in (1, 2) else answers()

    timeout = 1.0 if kind == "timeout" else 30.0
    found = figures(loaded(fake(script).url, Arrivals(2, None, 6, None), timeout), Bounds())
    assert found.errors == {kind: 2}
    assert (found.requests, found.failed, found.tokens) == (6, 2, 12)


def test_an_end_without_a_last_event_is_cut_off(fake: Start) -> None:
    found = figures(
        loaded(fake(lambda *_: [HEAD, said("a"), END]).url, Arrivals(1, None, 1, None)), Bounds()
    )
    assert found.errors == {"cut off": 1}


def test_no_server_and_no_http_are_failures(fake: Start) -> None:
    def of(url: str) -> Figures:
        return figures(loaded(url, Arrivals(1, None, 1, None)), Bounds())

    assert of("http://127.0.0.1:9").errors == {"refused connection": 1}
    assert of(fake(lambda *_: [b"hello\r\n\r\n"]).url).errors == {"cut off": 1}


@contextmanager
def impatient(answered: int) -> Iterator[str]:
    """A server that answers so many requests of each connection, and then closes it unannounced."""
    body = b"".join(step for step in answers() if isinstance(step, bytes))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            for _ in range(answered):
                if not self.request.recv(65536):
                    return
                self.request.sendall(body)
            self.request.recv(65536)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_kept_connection_that_was_closed_is_no_failure() -> None:
    with impatient(2) as url:
        found = figures(loaded(url, Arrivals(2, None, 9, None)), Bounds())
    assert (found.requests, found.failed, found.errors) == (9, 0, {})


def test_who_closes_every_connection_is_asked_once() -> None:
    with impatient(0) as url:
        found = figures(loaded(url, Arrivals(2, None, 4, None)), Bounds())
    assert found.errors == {"cut off": 4}
