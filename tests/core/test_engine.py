"""The engine: requests in, completions out, and the model given back as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Gate
from families import VOCAB, build, character_tokenizer, prompts

import jackfield
from jackfield.errors import PromptError, SettingsError, UsageError

PROMPTS = prompts((3, 9, 1, 6, 12, 2, 5))
TEXT = "Hello there"


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model) -> Iterator[jackfield.Engine]:
    with jackfield.load(model, tokenizer=character_tokenizer()) as engine:
        yield engine


def solo(engine: jackfield.Engine, **settings: Any) -> list[list[int]]:
    return [engine.generate(prompt, **settings)[0].token_ids for prompt in PROMPTS]


def joined(stream: Iterator[jackfield.Delta]) -> jackfield.Completion:
    """The completion of a stream, after checking that its deltas add up to it."""
    deltas = list(stream)
    assert [d.completion is None for d in deltas] == [True] * (len(deltas) - 1) + [False]
    completion = deltas[-1].completion
    assert "".join(d.text for d in deltas) == completion.text
    assert [t for d in deltas for t in d.token_ids] == completion.token_ids
    assert deltas[-1].finish_reason == completion.finish_reason
    return completion


def idle(engine: jackfield.Engine) -> bool:
    return not (engine._loop.running or engine._loop.waiting or engine._worker._open)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.5, "seed": 4},
        {"eos_token_id": list(range(0, VOCAB, 7))},
        {"stop": ["a", "b", "xy"], "temperature": 2.0, "seed": 1},
        {"logprobs": 2},
    ],
    ids=str,
)
def test_a_stream_is_what_generate_gives(engine, settings: dict[str, Any]) -> None:
    for prompt in (TEXT, PROMPTS[1]):
        (whole,) = engine.generate(prompt, max_new_tokens=20, **settings)
        streamed = joined(engine.stream(prompt, max_new_tokens=20, **settings))
        assert streamed.text == whole.text
        assert streamed.token_ids == whole.token_ids
        assert streamed.finish_reason == whole.finish_reason
        assert streamed.logprobs == whole.logprobs
    assert idle(engine)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_results_are_in_order_whatever_the_batch_size(model, size: int) -> None:
    counts = [7, 1, 5, 3, 8, 2, 4]
    with jackfield.load(model, max_batch_size=size) as engine:
        found = engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in counts])
        expected = solo(engine, max_new_tokens=8)
    assert [c.token_ids for c in found] == [e[:n] for e, n in zip(expected, counts, strict=True)]
    assert [c.usage.prompt_tokens for c in found] == [len(p) for p in PROMPTS]
    assert [c.usage.completion_tokens for c in found] == counts
    assert {c.finish_reason for c in found} == {"length"}
    assert all(c.text is None for c in found)


def test_seeded_text_is_the_same_alone_in_any_batch_and_in_any_order(engine) -> None:
    settings = [{"seed": i, "temperature": 0.8 + 0.3 * i, "top_p": 0.95} for i in range(7)]
    alone = [
        engine.generate(p, max_new_tokens=12, **s)[0].token_ids
        for p, s in zip(PROMPTS, settings, strict=True)
    ]
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 5, 0, 3, 1, 4], [3, 1], [5, 5, 0]):
        found = engine.generate(
            [PROMPTS[i] for i in order], settings=[settings[i] for i in order], max_new_tokens=12
        )
        assert [c.token_ids for c in found] == [alone[i] for i in order]
    assert alone != solo(engine, max_new_tokens=12)


def test_requests_without_a_seed_differ(engine) -> None:
    found = engine.generate([PROMPTS[0]] * 6, temperature=1.5, max_new_tokens=16)
    assert len({tuple(c.token_ids) for c in found}) == 6


def test_greedy_and_sampled_requests_share_a_batch(engine) -> None:
    greedy = solo(engine, max_new_tokens=8)
    settings = [{"temperature": 3.0} if i % 2 else {} for i in range(7)]
    found = engine.generate(PROMPTS, settings=settings, max_new_tokens=8)
    assert [c.token_ids for c in found[::2]] == greedy[::2]
    assert [c.token_ids for c in found[1::2]] != greedy[1::2]


def test_a_request_that_forbids_every_token_errs_alone(engine) -> None:
    settings: list[dict[str, Any]] = [{} for _ in PROMPTS]
    settings[3] = {"suppress_tokens": list(range(VOCAB))}
    found = engine.generate(PROMPTS, settings=settings, max_new_tokens=6)
    expected = solo(engine, max_new_tokens=6)
    assert [c.token_ids for i, c in enumerate(found) if i != 3] == expected[:3] + expected[4:]
    assert found[3].finish_reason == "error"
    assert "forbid every token" in found[3].error
    assert found[3].token_ids == []
    assert idle(engine)


def test_logprobs_are_those_of_the_model(model) -> None:
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        (found,) = engine.generate(
            PROMPTS[1], max_new_tokens=6, logprobs=3, temperature=0.7, seed=1,
            repetition_penalty=1.5,
        )  # fmt: skip
        ids = torch.tensor([PROMPTS[1] + found.token_ids])
        with torch.inference_mode():
            expected = model(ids).logits[0].log_softmax(-1)[len(PROMPTS[1]) - 1 : -1]
    assert [p.token_id for p in found.logprobs] == found.token_ids
    for row, entry in zip(expected, found.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-9)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


def test_prompts_are_text_ids_or_messages(engine) -> None:
    ids = engine.tokenizer(TEXT)["input_ids"]
    messages = [{"role": "user", "content": TEXT}]
    templated = engine.tokenizer(f"[user] {TEXT}>")["input_ids"]
    expected = engine.generate([ids, templated], max_new_tokens=5)
    for given in ([TEXT, messages], (ids, tuple(messages)), [torch.tensor(ids), messages]):
        found = engine.generate(given, max_new_tokens=5)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for one in (messages, templated, torch.tensor(templated)):
        (found,) = engine.generate(one, max_new_tokens=5)
        assert found.token_ids == expected[1].token_ids
        assert found.usage.prompt_tokens == len(templated)


def test_no_prompt_is_no_completion_and_its_settings_are_checked(engine) -> None:
    assert engine.generate([], max_new_tokens=5) == []
    for wrong in ({"unknown": 1}, {"max_new_tokens": "x"}, {"temperature": -1}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            engine.generate([], **wrong)


def test_stop_strings_end_the_text_and_the_request(engine) -> None:
    (full,) = engine.generate(TEXT, max_new_tokens=20)
    stop = full.text[6:8]
    (found,) = engine.generate(TEXT, max_new_tokens=20, stop=stop)
    assert found.text == full.text[: full.text.index(stop)]
    assert found.finish_reason == "stop"
    assert len(found.token_ids) == len(found.text) + 2
    assert found.token_ids == full.token_ids[: len(found.token_ids)]


def test_the_end_token_ends_the_request_and_is_kept(engine) -> None:
    (full,) = engine.generate(PROMPTS[0], max_new_tokens=20)
    end = full.token_ids[7]
    cut = full.token_ids.index(end) + 1
    (found,) = engine.generate(PROMPTS[0], max_new_tokens=20, eos_token_id=[end])
    assert (found.token_ids, found.finish_reason) == (full.token_ids[:cut], "stop")
    (later,) = engine.generate(
        PROMPTS[0], max_new_tokens=20, eos_token_id=[end], min_new_tokens=cut + 2
    )
    assert end not in later.token_ids[: cut + 2]


def test_interleaved_streams_do_not_disturb_each_other(engine) -> None:
    expected = solo(engine, max_new_tokens=10)
    streams = [engine.stream(prompt, max_new_tokens=10) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in PROMPTS]
    for turn in range(30):
        for i, stream in enumerate(streams):
            if turn >= i and (delta := next(stream, None)):
                found[i] += delta.token_ids
    assert found == expected
    assert idle(engine)


def test_a_stream_that_is_closed_early_is_cancelled(engine) -> None:
    expected = solo(engine, max_new_tokens=10)
    left, right = (engine.stream(prompt, max_new_tokens=10) for prompt in PROMPTS[:2])
    first = next(left).token_ids
    next(right)
    left.close()
    waiting = engine.stream(PROMPTS[2], max_new_tokens=10)
    rest = [t for d in right for t in d.token_ids]
    assert first == expected[0][:1]
    assert rest == expected[1][1:]
    assert joined(waiting).token_ids == expected[2]
    unread = engine.stream(PROMPTS[3])
    unread.close()
    assert idle(engine)


def test_a_stream_that_was_closed_computes_nothing_more(engine) -> None:
    gate = Gate(engine)
    stream = engine.stream(PROMPTS[0], max_new_tokens=50)
    gate.admit()
    next(stream)
    stream.close()
    gate.lift()
    engine.generate(PROMPTS[1], max_new_tokens=4)
    assert engine._loop.steps < 50
    before = engine._loop.steps
    engine.generate(PROMPTS[1], max_new_tokens=4)
    assert engine._loop.steps == before + 4


@pytest.mark.parametrize("size", [1, 3, 32])
def test_threads_share_an_engine(model, size: int) -> None:
    found: dict[int, Any] = {}
    with jackfield.load(model, max_batch_size=size, tokenizer=character_tokenizer()) as engine:
        expected = solo(engine, max_new_tokens=9)
        barrier = threading.Barrier(len(PROMPTS))

        def work(i: int) -> None:
            barrier.wait()
            try:
                if i % 2:
                    completions = engine.generate([PROMPTS[i]] * 2, max_new_tokens=9)
                else:
                    completions = [joined(engine.stream(PROMPTS[i], max_new_tokens=9))]
                found[i] = [c.token_ids for c in completions]
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                found[i] = error

        for _ in range(3):
            threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert found == {i: [e] * (1 + i % 2) for i, e in enumerate(expected)}
            found.clear()
        assert idle(engine)


def test_nothing_is_computed_for_a_batch_with_a_mistake(engine) -> None:
    with pytest.raises(PromptError, match="no token id"):
        engine.generate([PROMPTS[0], [VOCAB]])
    with pytest.raises(SettingsError, match="top_p"):
        engine.generate(PROMPTS[:2], settings=[{}, {"top_p": 7}])
    with pytest.raises(SettingsError, match="1 settings for 2 prompts"):
        engine.generate(PROMPTS[:2], settings=[{}])
    with pytest.raises(UsageError, match="one prompt"):
        engine.stream(PROMPTS[:2])
    with pytest.raises(SettingsError, match="temperature"):
        engine.stream(PROMPTS[0], temperature=-1)
    assert engine._loop.steps == 0
    assert idle(engine)


def test_usage_and_report_are_those_of_the_request(engine) -> None:
    engine.generate(PROMPTS[0], max_new_tokens=3)
    (found,) = engine.generate(PROMPTS[1], max_new_tokens=5)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (9, 5)
    assert found.usage.seconds > 0
    seen = found.report["attention"]
    assert (seen.prefill, seen.decode) == ({0: 1, 1: 1}, {0: 4, 1: 4})
    assert engine.report()["attention"].calls == 2 * (3 + 5)
    assert {o.distribution for o in found.report.observations} == {"jackfield"}
    assert set(found.to_dict()["report"]) == {
        "attention", "cache", "compiler", "decoding", "quantizer", "scheduler",
    }  # fmt: skip


def test_the_model_may_have_no_tokenizer(tmp_path: Path) -> None:
    build("llama", torch.float32).save_pretrained(tmp_path)
    with jackfield.load(tmp_path) as engine:
        (found,) = engine.generate(PROMPTS[0], max_new_tokens=3)
        assert len(found.token_ids) == 3
        assert found.text is None
        for prompt in (TEXT, [{"role": "user", "content": TEXT}]):
            with pytest.raises(PromptError, match="no tokenizer"):
                engine.generate(prompt)
        with pytest.raises(SettingsError, match="tokenizer"):
            engine.generate(PROMPTS[0], stop="x")


def test_a_folder_gives_the_tokens_of_the_model_that_was_saved(tmp_path: Path, engine) -> None:
    build("llama").save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    (expected,) = engine.generate(TEXT, max_new_tokens=8)
    with jackfield.load(str(tmp_path)) as loaded:
        assert str(loaded.model.dtype) == "torch.float64"
        (found,) = loaded.generate(TEXT, max_new_tokens=8)
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)


def test_an_engine_that_is_dropped_gives_the_model_back(model) -> None:
    before = model.config._attn_implementation
    engine = jackfield.load(model, attn_implementation="sdpa")
    assert model.config._attn_implementation != before
    del engine
    gc.collect()
    assert model.config._attn_implementation == before
    jackfield.load(model).close()
