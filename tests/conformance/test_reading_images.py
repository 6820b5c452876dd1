"""Images of chats on their way into an engine: what is read of them, and what waits meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import extras
import pytest

import jackfield
from jackfield.bridge.image_encoder import ImageEncoder
from jackfield.bridge.image_reader import ImageReader
from jackfield.engine.engine import Engine
from jackfield.errors import PromptError, QueueFullError, UsageError

with extras.imports():
    from seeing import build, chat, generated, picture, sixteen

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
LONG: dict[str, Any] = {**GREEDY, "max_new_tokens": 1500}


@pytest.fixture(scope="module")
def llava() -> Any:
    return build("llava")


@pytest.fixture
def read(llava: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the images stood that a processor was given, once the model is loaded."""
    found: list[str] = []
    own = ImageReader.read

    def reading(self: ImageReader, where: str, image: Any) -> Any:
        found.append(where)
        return own(self, where, image)

    monkeypatch.setattr(ImageReader, "read", reading)
    return found


@pytest.fixture
def full(llava: Any, read: list[str]) -> Iterator[Engine]:
    """An engine whose queue is full."""
    model, processor = llava
    with jackfield.load(model, tokenizer=processor, max_batch_size=1, max_waiting=1) as engine:
        hold = engine.submit(chat("go on"), **LONG)
        next(iter(hold))
        engine.submit(chat("and on"), **LONG)
        read.clear()
        yield engine
        assert not hold.done


def test_nothing_more_is_read_once_images_fill_the_context(llava: Any, read: list[str]) -> None:
    model, processor = llava
    one = picture(0, 24, 24)
    with jackfield.load(model, tokenizer=processor) as engine:
        each = engine.count_tokens(chat(one, one, "x")) - engine.count_tokens(chat(one, "x"))
        most = 2048 // each
        read.clear()
        why = (
            f"message 0, part {most}: the first {most + 1} of the chat's 250 images have "
            f"{(most + 1) * each} tokens, the model's context is 2048: give fewer images, or"
        )
        with pytest.raises(PromptError, match=why):
            engine.generate([chat(*[one] * 250)], **GREEDY)
    assert len(read) == most + 1 < 250


@pytest.mark.parametrize(
    ("words", "settings", "why"),
    [
        (
            2045,
            {},
            r"the prompt has \d+ tokens \(9 of them of its images\), the model's context is",
        ),
        (
            9000,
            {},
            r"has more than 2048 tokens \(9 of them of its images\), the model's context is",
        ),
        (
            3,
            {"max_new_tokens": 2047},
            r"prompt of \d+ tokens \(9 of them of its images\) and max_new",
        ),
    ],
)
def test_too_long_a_chat_is_told_what_its_images_take(
    llava: Any, words: int, settings: dict[str, Any], why: str
) -> None:
    """Nothing is said of characters that nobody has written."""
    model, processor = llava
    with jackfield.load(model, tokenizer=processor) as engine:
        with pytest.raises(PromptError, match=why) as caught:
            engine.generate([chat(picture(0), "the " * words)], **{**GREEDY, **settings})
        assert "characters" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [Engine.submit, Engine.submit_samples, lambda *a, **k: asyncio.run(Engine.asubmit(*a, **k))],
)
def test_a_full_queue_is_seen_before_an_image_is_opened(
    full: Engine, read: list[str], call: Callable[..., Any]
) -> None:
    with pytest.raises(QueueFullError, match="1 requests wait already, and max_waiting=1"):
        call(full, chat(picture(0), picture(1), "what"), **GREEDY)
    assert read == []


def test_who_waits_no_more_says_so_between_images(llava: Any, read: list[str]) -> None:
    model, processor = llava
    asked = chat(picture(0), picture(1), picture(2), "what")

    def look() -> None:
        if read:
            raise TimeoutError("too late")

    with jackfield.load(model, tokenizer=processor) as engine:
        read.clear()
        with pytest.raises(TimeoutError, match="too late"):
            engine.submit_samples(asked, before_image=look, **GREEDY)
        assert read == ["message 0, part 0"]
        assert engine.statistics().waiting == 0


def streamed(engine: Engine, prompt: Any, **asked: Any) -> Any:
    async def read() -> Any:
        return [delta async for delta in engine.astream(prompt, **asked)][-1].completion

    return asyncio.run(read())


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, *a, **k: engine.generate([*a], **k)[0],
        lambda engine, *a, **k: engine.submit(*a, **k).result(),
        lambda engine, *a, **k: engine.submit_samples(*a, **k)[0].result(),
        lambda engine, *a, **k: asyncio.run(engine.asubmit(*a, **k)).result(),
        streamed,
    ],
    ids=["generate", "submit", "submit_samples", "asubmit", "astream"],
)
@pytest.mark.one_in(4)
def test_a_deadline_counts_from_the_call(
    llava: Any, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other time of a request does: its prompt was read before it came."""
    model, processor = llava
    own = ImageReader.read

    def slowly(*given: Any) -> Any:
        time.sleep(0.6)
        return own(*given)

    with jackfield.load(model, tokenizer=processor) as engine:
        monkeypatch.setattr(ImageReader, "read", slowly)
        late = call(engine, chat(picture(0), "what"), **GREEDY, deadline=0.5)
        assert (late.finish_reason, late.token_ids) == ("cancelled", [])
        assert late.error == "its deadline of 0.5 s passed"
        assert late.usage.seconds < 0.5
        whole = call(engine, chat(picture(0), "what"), **GREEDY, deadline=100)
        assert whole.finish_reason == "length"


def test_a_task_that_is_cancelled_leaves_its_other_images_unread(
    llava: Any, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = llava
    came, go = threading.Event(), threading.Event()
    own = ImageReader.read

    def held(*given: Any) -> Any:
        came.set()
        assert go.wait(60)
        return own(*given)

    async def leave(engine: Engine) -> None:
        asked = chat(picture(0), picture(1), picture(2), "what")
        task = asyncio.create_task(engine.asubmit(asked, **GREEDY))
        assert await asyncio.to_thread(came.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()

    with jackfield.load(model, tokenizer=processor) as engine:
        read.clear()
        monkeypatch.setattr(ImageReader, "read", held)
        asyncio.run(leave(engine))  # which waits for its threads
    assert read == ["message 0, part 0"]


def test_an_engine_that_was_closed_reads_no_further_image(
    llava: Any, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = llava
    engine = jackfield.load(model, tokenizer=processor)
    read.clear()
    own = ImageReader.read
    monkeypatch.setattr(ImageReader, "read", lambda *given: (engine.close(), own(*given))[1])
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate([chat("text"), chat(picture(0), picture(1))], **GREEDY)
    assert read == ["message 0, part 0"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the model was asked of each image, after how many steps of the loop."""
    found: list[int] = []
    made: list[Any] = []
    own = ImageEncoder.read
    load = jackfield.load

    def loaded(*given: Any, **how: Any) -> Engine:
        engine = load(*given, **how)
        made.append(engine._loop)
        return engine

    def reading(self: ImageEncoder, fields: Any) -> Any:
        found.extend(loop.steps for loop in made)
        return own(self, fields)

    monkeypatch.setattr(jackfield, "load", loaded)
    monkeypatch.setattr(ImageEncoder, "read", reading)
    return found


def test_streams_have_a_step_between_two_images(llava: Any, seen: list[int]) -> None:
    model, processor = llava
    asked = [
        chat(*map(picture, range(4)), "what"), chat("no image"), chat(picture(7), "x"),
        chat(picture(1), picture(8), "y"),
    ]  # fmt: skip
    expected = [generated(model, processor, one, **GREEDY) for one in asked]
    with jackfield.load(model, tokenizer=processor) as engine:
        stream = engine.submit(chat("go on"), **LONG)
        next(iter(stream))
        requests = [engine.submit(one, **GREEDY) for one in asked]
        assert [request.result(60).token_ids for request in requests] == expected
        assert not stream.done
    assert len(seen) == len(set(seen)) == 6


def test_texts_enter_before_chats_whose_images_are_read(
    llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With samples, too, whose prompt the first one reads for all."""
    model, processor = llava
    several = chat(*map(picture, range(5)), "what")
    expected = generated(model, processor, several, **GREEDY)
    ended: list[int] = []
    own = ImageEncoder.read
    with jackfield.load(model, tokenizer=processor) as engine:
        metrics = engine._loop.metrics

        def reading(self: ImageEncoder, fields: Any) -> Any:
            ended.append(metrics.finished["length"])
            return own(self, fields)

        monkeypatch.setattr(ImageEncoder, "read", reading)
        stream = engine.submit(chat("go on"), **LONG)
        next(iter(stream))
        settings = [{"do_sample": True, "num_return_sequences": 2, "seed": 1}, {}]
        settings += [{"max_new_tokens": 1}] * 2
        asked = [several, several, chat("no image"), chat("none here either")]
        found = engine.generate(asked, settings=[{**GREEDY, **one} for one in settings])
        assert found[2].token_ids == expected
        assert not stream.done
    assert ended == [0, 2, 2, 2, 2]


def test_where_nobody_runs_all_images_are_read_at_once(llava: Any, seen: list[int]) -> None:
    """Requests that come together run together."""
    model, processor = llava
    with jackfield.load(model, tokenizer=processor) as engine:
        engine.generate(sixteen(), **GREEDY)
    assert seen == [0, 0, 0]


def test_images_are_read_while_there_is_no_place(llava: Any, seen: list[int]) -> None:
    """So whoever is next enters with the next place, as by its priority it has to."""
    model, processor = llava
    several = chat(*map(picture, range(4)), "what")
    expected = generated(model, processor, several, **GREEDY)
    with jackfield.load(model, tokenizer=processor, max_batch_size=2) as engine:
        stream = engine.submit(chat("go on"), **LONG)
        short = engine.submit(chat("and on"), **{**LONG, "max_new_tokens": 60})
        next(iter(short))
        asked = engine.submit(several, priority=5, **GREEDY)
        texts = [engine.submit(chat("no image"), **GREEDY) for _ in range(6)]
        assert asked.result(60).token_ids == expected
        assert short.done
        assert not any(text.done for text in texts[1:])
        assert not stream.done
    assert len(set(seen)) == 4
    assert max(seen) - min(seen) == 3


def test_where_nobody_runs_others_come_between_two_images(
    llava: Any, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where images take longer than a moment, and so that a chat may be cancelled meanwhile."""
    model, processor = llava
    monkeypatch.setattr("jackfield.engine.step_images.ALONE_SECONDS", 0.0)
    own, go = ImageEncoder.read, threading.Event()

    def reading(self: ImageEncoder, fields: Any) -> Any:
        assert go.wait(60)
        if len(seen) == 3:
            asked.cancel()
        return own(self, fields)

    with jackfield.load(model, tokenizer=processor) as engine:
        monkeypatch.setattr(ImageEncoder, "read", reading)
        asked = engine.submit(chat(*map(picture, range(9)), "what"), **GREEDY)
        text = engine.submit(chat("no image"), **LONG)
        go.set()
        assert asked.result(60).finish_reason == "cancelled"
        assert not text.done
    assert len(seen) == 4
    assert seen[0] == 0
    assert seen[-1] > 0


def test_what_reading_images_takes_is_nothing_that_tokens_cost(
    llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = llava
    own, now, counted = ImageEncoder.read, [0.0], list[float]()
    with jackfield.load(model, tokenizer=processor) as engine:

        def reading(self: ImageEncoder, fields: Any) -> Any:
            now[0] += 1000
            return own(self, fields)

        monkeypatch.setattr(ImageEncoder, "read", reading)
        monkeypatch.setattr(engine._loop, "clock", lambda: now[0])
        monkeypatch.setattr(
            engine._loop._pace, "count", lambda step, seconds, *, waited: counted.append(seconds)
        )
        stream = engine.submit(chat("go on"), **LONG)
        next(iter(stream))
        engine.submit(chat(*map(picture, range(3)), "what"), **GREEDY).result(60)
        assert not stream.done
        assert engine._loop.images is not None
        assert engine._loop.images.kept.num_bytes > 0
    assert now[0] == 3000
    assert set(counted) == {0.0}
    assert engine._loop.images.kept.num_bytes == 0  # a closed engine keeps nothing


def test_a_request_that_is_cancelled_between_images_has_no_further_one_read(
    llava: Any, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = llava
    asked = chat(*map(picture, range(4)), "what")
    expected = generated(model, processor, asked, **GREEDY)
    own, gone = ImageEncoder.read, list[Any]()

    def cancelling(self: ImageEncoder, fields: Any) -> Any:
        if len(seen) == 1:
            gone[0].cancel()
        return own(self, fields)

    with jackfield.load(model, tokenizer=processor) as engine:
        stream = engine.submit(chat("go on"), **LONG)
        next(iter(stream))
        monkeypatch.setattr(ImageEncoder, "read", cancelling)
        submit = engine._worker.submit

        def submitting(pairs: Any, *, wait: bool) -> None:
            gone.extend(request for _, request in pairs)
            submit(pairs, wait=wait)

        monkeypatch.setattr(engine._worker, "submit", submitting)
        assert engine.submit(asked, **GREEDY).result(60).finish_reason == "cancelled"
        assert len(seen) == 2
        assert engine.submit(asked, **GREEDY).result(60).token_ids == expected
        assert not stream.done


@pytest.mark.parametrize(
    ("seed", "cache"), [(1, "paged?page_size=4"), (2, "paged?page_size=4&num_tokens=600")]
)
def test_storms_leave_nothing_behind(
    llava: Any, monkeypatch: pytest.MonkeyPatch, seed: int, cache: str
) -> None:
    """Samples, beams, priorities, cancelled ones and images that fail, beside a stream."""
    model, processor = llava
    drawn = random.Random(seed)
    chats = [*sixteen(), chat(*map(picture, range(6)), "a"), chat(*map(picture, range(3, 9)), "b")]
    beams = {"max_new_tokens": 6, "eos_token_id": None, "num_beams": 3}
    ways: list[dict[str, Any]] = [GREEDY, {**GREEDY, "num_return_sequences": 2, "top_k": 1}, beams]
    ways[1]["do_sample"] = True
    greedy = [generated(model, processor, one, **GREEDY) for one in chats]
    searched = [generated(model, processor, one, **beams) for one in chats[-2:]]
    own = ImageEncoder.read

    def failing(self: ImageEncoder, fields: Any) -> Any:
        if drawn.random() < 0.05:
            raise RuntimeError("a bad image")
        return own(self, fields)

    monkeypatch.setattr(ImageEncoder, "read", failing)
    how: dict[str, Any] = {"cache_implementation": cache, "max_batch_size": 4}
    how["decoding"] = {"sample": "sample", "beam": "beam"}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        stream, asked = (
            engine.submit(chat("go on"), **{**LONG, "max_new_tokens": 400}),
            list[tuple[Any, list[int]]](),
        )
        for _ in range(24):
            at, way = drawn.randrange(len(chats)), drawn.choice(ways)
            if way is beams:
                at = drawn.randrange(-2, 0)
            right = searched[at] if way is beams else greedy[at]
            requests = engine.submit_samples(chats[at], **way, priority=drawn.choice([0, 0, 1]))
            asked += [(request, right) for request in requests]
            if drawn.random() < 0.15:
                requests[-1].cancel()
        found = [(request.result(60), right) for request, right in asked]
        stream.cancel()
        stream.result(60)
        loop = engine._loop
        assert (len(loop.waiting), loop.running, loop.waiting.leaders) == (0, [], False)
    whole = [(one, right) for one, right in found if one.finish_reason == "length"]
    assert len(whole) > len(found) / 2
    assert all(one.token_ids == right for one, right in whole)
    others = {one.error for one, _ in found if one.finish_reason != "length"}
    assert others <= {None, "its image failed: RuntimeError: a bad image"}
