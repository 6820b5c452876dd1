"""The figures of an engine are those of what it did."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from driven import Arrival, Gate, drive
from families import build, prompts

import jackfield
from jackfield.contracts import CacheUsage
from jackfield.engine import worker as worker_module
from jackfield.engine.statistics import REMEMBERED, Metrics, Statistics

LENGTHS = (9, 4, 13, 6)
COUNT = 5


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture
def engine(model: Any) -> Iterator[jackfield.Engine]:
    with jackfield.load(model, cache_implementation="paged?page_size=4&num_tokens=256") as engine:
        yield engine


def idle(engine: jackfield.Engine) -> None:
    worker = engine._worker
    with worker._changed:
        assert worker._changed.wait_for(lambda: worker._thread is None, 60)


def test_a_new_engine_has_done_nothing(engine: jackfield.Engine) -> None:
    found = engine.statistics()
    assert (found.steps, found.tokens_in, found.tokens_out, found.finished) == (0, 0, 0, {})
    assert (found.time_to_first_token, found.time_per_token) == (None, None)
    assert found.prefix_hit_rate == 0
    assert str(found) == (
        "0 running, 0 waiting; 0 finished; 0 tokens in, 0 out, 0 steps; "
        "pages 0 used, 0 kept, of 64; prefix hits 0%, 0 preemptions"
    )


def test_tokens_are_counted_in_out_and_through_the_model(engine: jackfield.Engine) -> None:
    engine._loop.cache.inner._forgets = False  # as for a model that nobody else holds
    texts = prompts(LENGTHS)
    engine.generate(texts, max_new_tokens=COUNT)
    idle(engine)
    first = engine.statistics()
    assert (first.tokens_in, first.tokens_out) == (sum(LENGTHS), COUNT * len(LENGTHS))
    assert first.tokens_computed == sum(LENGTHS) + (COUNT - 1) * len(LENGTHS)
    assert (first.steps, first.preemptions, first.finished) == (COUNT, 0, {"length": 4})
    engine.generate(texts, max_new_tokens=COUNT)
    idle(engine)
    again = engine.statistics()
    hits = sum((n - 1) // 4 * 4 for n in LENGTHS)
    assert again.cache is not None
    assert (again.cache.prompt_tokens, again.cache.prefix_tokens) == (2 * sum(LENGTHS), hits)
    assert again.prefix_hit_rate == hits / (2 * sum(LENGTHS))
    assert again.tokens_computed == 2 * first.tokens_computed - hits
    assert f"prefix hits {again.prefix_hit_rate:.0%}" in str(again)
    assert again.cache.num_bytes == 2 * 2 * 256 * 2 * 8 * 8  # k, v; layers; tokens; heads; dim; 8


def test_times_are_medians_in_seconds(engine: jackfield.Engine) -> None:
    found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
    idle(engine)
    figures = engine.statistics()
    assert figures.time_to_first_token is not None
    assert figures.time_per_token is not None
    longest = max(completion.usage.seconds for completion in found)
    assert 0 < figures.time_to_first_token < longest
    assert 0 < figures.time_per_token < longest
    assert f"first token after {figures.time_to_first_token:.3f} s; then " in str(figures)


def test_how_requests_ended_is_counted(engine: jackfield.Engine) -> None:
    text = prompts((6,))[0]
    (whole,) = engine.generate(text, max_new_tokens=COUNT)
    engine.generate(text, max_new_tokens=COUNT, eos_token_id=whole.token_ids[2])
    engine.generate(text, max_new_tokens=COUNT, suppress_tokens=list(range(120)))
    gate = Gate(engine)
    request = engine.submit(text, max_new_tokens=COUNT)
    gate.inside()
    request.cancel()
    gate.lift()
    request.result(60)
    idle(engine)
    found = engine.statistics()
    assert found.finished == {"length": 1, "stop": 1, "error": 1, "cancelled": 1}
    assert found.tokens_in == 4 * 6
    assert "4 finished" in str(found)


@pytest.mark.parametrize("swap", [False, True])
def test_preemptions_and_what_they_cost_are_counted(model: Any, swap: bool) -> None:
    seen: list[Statistics] = []
    with jackfield.load(
        model,
        cache_implementation=f"paged?page_size=4&num_tokens=40&prefix_sharing=False&swap={swap}",
    ) as engine:
        found = drive(
            engine,
            [Arrival(0, text, max_new_tokens=20) for text in prompts((5,) * 4)],
            after=lambda loop: seen.append(engine.statistics()),
        )
        figures = engine.statistics()
    assert figures.preemptions == sum(s.preemptions for (s,) in found) > 0
    assert max(f.running for f in seen) > 1
    assert max(f.waiting for f in seen) > 0
    assert figures.cache is not None
    assert figures.cache.prompt_tokens == 4 * 5  # each entered once, whatever came after
    once = 4 * (5 + 19)
    assert figures.tokens_computed == once if swap else figures.tokens_computed > once
    assert any(f.cache is not None and f.cache.swapped for f in seen) is swap
    assert f"{figures.preemptions} preemptions" in str(figures)


def test_a_padded_cache_has_no_pages_to_tell_of(model: Any) -> None:
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        idle(engine)
        found = engine.statistics()
    assert (found.cache, found.prefix_hit_rate) == (None, 0.0)
    assert "pages" not in str(found)
    assert found.tokens_out == COUNT * len(LENGTHS)


def test_they_are_plain_data(engine: jackfield.Engine) -> None:
    engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
    found = json.loads(json.dumps(engine.statistics().to_dict()))
    assert found["finished"] == {"length": 4}
    assert found["cache"]["pages"] == 64
    assert found["prefix_hit_rate"] == 0


def test_only_the_last_thousand_requests_count_in_the_times() -> None:
    metrics = Metrics()
    metrics._first.extend([9.0] * REMEMBERED)
    metrics._later.extend([1.0, 3.0])
    assert metrics.times() == (9.0, 2.0)
    metrics._first.extend([1.0] * REMEMBERED)
    assert metrics.times() == (1.0, 2.0)


def test_the_words_are_short() -> None:
    usage = CacheUsage(
        pages=10, pages_used=3, pages_kept=2, page_size=4, prompt_tokens=200, prefix_tokens=50,
        swapped=0, num_bytes=1,
    )  # fmt: skip
    found = Statistics(
        running=2, waiting=1, steps=7, finished={"length": 2, "stop": 1}, tokens_in=200,
        tokens_computed=150, tokens_out=40, preemptions=1, time_to_first_token=0.25,
        time_per_token=0.0125, cache=usage,
    )  # fmt: skip
    assert str(found) == (
        "2 running, 1 waiting; 3 finished; 200 tokens in, 40 out, 7 steps; pages 3 used, 2 kept, "
        "of 10; prefix hits 25%, 1 preemptions; first token after 0.250 s; then 12.5 ms a token"
    )


def test_they_are_logged_now_and_then(
    engine: jackfield.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "jackfield.statistics"]

    caplog.set_level(logging.INFO, "jackfield.statistics")
    monkeypatch.setattr(worker_module, "LOG_EVERY", 1e9)
    engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
    idle(engine)
    assert lines() == []
    monkeypatch.setattr(worker_module, "LOG_EVERY", 0.0)
    engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
    idle(engine)
    assert "8 finished; 64 tokens in, 40 out" in lines()[-1]
    caplog.set_level(logging.WARNING, "jackfield.statistics")
    caplog.clear()
    engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
    idle(engine)
    assert lines() == []


def test_a_cache_that_cannot_tell_its_usage_ends_no_request(
    engine: jackfield.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage() -> None:
        raise RuntimeError("counts are gone")

    monkeypatch.setattr("jackfield.engine.worker.LOG_EVERY", 0.0)
    monkeypatch.setattr(engine._loop.cache, "usage", usage)
    with caplog.at_level("INFO", "jackfield.statistics"):
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
    assert {len(completion.token_ids) for completion in found} == {COUNT}
    assert "no statistics: RuntimeError: counts are gone" in caplog.text


def test_drafts_are_in_the_figures(model: Any) -> None:
    with jackfield.load(model, decoding="prompt_lookup?max_matching_ngram_size=1") as engine:
        found = engine.generate([prompts((4,))[0] * 3] * 2, max_new_tokens=40)
        idle(engine)
        figures = engine.statistics()
    drafts = figures.speculation
    assert drafts is not None
    each = [completion.report.speculation for completion in found]
    assert drafts.proposed == sum(one.proposed for one in each if one)
    assert drafts.tokens == figures.tokens_out == 80
    assert drafts.proposed > 0
    assert drafts.tokens_per_step == drafts.tokens / drafts.steps
    assert figures.to_dict()["speculation"]["acceptance_rate"] == drafts.acceptance_rate
    assert f"{drafts.accepted} of {drafts.proposed} drafts right" in str(figures)
