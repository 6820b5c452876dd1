"""What a request may bring along from `generate`: criteria, prefix functions, a streamer, names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafting import draft_of
from families import VOCAB, build, character_tokenizer
from transformers import GenerationConfig, MaxTimeCriteria, StoppingCriteriaList, TextStreamer
from transformers.generation.stopping_criteria import EosTokenCriteria, StopStringCriteria

import jackfield
from jackfield.errors import SettingsError

PROMPTS = [[5, 6, 7, 8, 9], [3, 2, 4], [11, 12, 13, 14]]
OFFERED = {"plain": "sample", "lookup": "prompt_lookup", "assist": "assisted", "beams": "beam"}


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", torch.float64)


@pytest.fixture(scope="module")
def engine() -> Iterator[jackfield.Engine]:
    with jackfield.load(
        build("llama", torch.float64),
        decoding=OFFERED,
        assistant_model=draft_of("llama"),
        tokenizer=character_tokenizer(),
    ) as found:
        yield found


def refusal(engine: jackfield.Engine, **asked: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        engine.generate(PROMPTS[0], **{"max_new_tokens": 3, **asked})
    return str(caught.value)


@pytest.mark.parametrize("decoding", ["plain", "lookup", "assist"])
def test_stopping_criteria_end_a_text_where_generate_ends_it(
    engine: jackfield.Engine, model: Any, decoding: str
) -> None:
    asked = {"max_new_tokens": 20, "do_sample": False}
    free = [c.token_ids for c in engine.generate(PROMPTS, **asked)]
    tokenizer = character_tokenizer()
    for criteria in (
        lambda ids, scores: ids.shape[1] >= 9,
        [EosTokenCriteria([free[0][4], free[1][2]])],
        StoppingCriteriaList([StopStringCriteria(tokenizer, [tokenizer.decode(free[2][3:5])])]),
    ):
        found = engine.generate(PROMPTS, decoding=decoding, stopping_criteria=criteria, **asked)
        for prompt, completion in zip(PROMPTS, found, strict=True):
            listed = criteria if isinstance(criteria, list) else [criteria]
            whole = model.generate(
                torch.tensor([prompt]),
                stopping_criteria=StoppingCriteriaList(
                    [lambda ids, s, c=c: torch.as_tensor(c(ids, s)).reshape(1) for c in listed]
                ),
                **asked,
            )
            assert completion.token_ids == whole[0, len(prompt) :].tolist()
            ended = len(completion.token_ids) < 20
            assert completion.finish_reason == ("stop" if ended else "length")


class Poison(BaseException):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize("name", ["stopping_criteria", "prefix_allowed_tokens_fn"])
@pytest.mark.parametrize("failing", [Poison, SystemExit, ValueError, KeyboardInterrupt])
def test_one_that_fails_ends_its_own_request(
    engine: jackfield.Engine, name: str, failing: type[BaseException]
) -> None:
    (alone,) = engine.generate(PROMPTS[0], max_new_tokens=8)

    def fail(one: Any, other: Any) -> Any:
        raise failing

    beside, hostile = engine.generate(PROMPTS[:2], max_new_tokens=8, settings=[{}, {name: fail}])
    assert beside.token_ids == alone.token_ids
    assert hostile.finish_reason == "error"
    assert failing.__name__ in (hostile.error or "")


@pytest.mark.parametrize("answer", [None, "x", [[]], torch.tensor([True, False])])
def test_an_answer_that_is_none_ends_its_own_request(engine: jackfield.Engine, answer: Any) -> None:
    (found,) = engine.generate(
        PROMPTS[0], max_new_tokens=4, prefix_allowed_tokens_fn=lambda number, ids: []
    )
    assert (found.error or "").startswith("its prefix_allowed_tokens_fn failed: ")
    assert "allows no token" in (found.error or "")
    (found,) = engine.generate(
        PROMPTS[0], max_new_tokens=4, stopping_criteria=lambda ids, scores: answer
    )
    assert (found.finish_reason == "error") == isinstance(answer, torch.Tensor)


@pytest.mark.parametrize(
    "answer",
    [
        [-1], [3, -2], [10**9], [10**30], [1.5], [True, False], [float("nan")], [1j], ["a"], None,
        torch.ones(VOCAB, dtype=torch.bool), torch.tensor([VOCAB]), {3: 4}, [[3], 4],
    ],
)  # fmt: skip
def test_what_is_no_list_of_tokens_is_not_taken_for_some(
    engine: jackfield.Engine, answer: Any
) -> None:
    """Indices of Python count from the end, and a mask of the vocabulary has zeros and ones."""
    for more in ({}, {"num_beams": 2}, {"decoding": "lookup"}):
        (found,) = engine.generate(
            PROMPTS[0],
            max_new_tokens=4,
            prefix_allowed_tokens_fn=lambda number, ids: answer,
            **more,
        )
        assert (found.error or "").startswith("its prefix_allowed_tokens_fn failed: ")
        assert not found.token_ids


@pytest.mark.parametrize("decoding", ["plain", "lookup", "assist"])
def test_a_prefix_function_is_told_the_number_of_the_prompt(
    engine: jackfield.Engine, model: Any, decoding: str
) -> None:
    def allowed(number: int, ids: torch.Tensor) -> list[int]:
        return [20 + number, 30 + number, int(ids[-1])] if len(ids) % 2 else [40, 41 + number]

    asked = {"max_new_tokens": 8, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    same = [PROMPTS[2], [1, 2, 3, 4], [9, 8, 7, 6]]
    expected = model.generate(torch.tensor(same), **asked)[:, 4:].tolist()
    found = engine.generate(same, decoding=decoding, **asked)
    assert [c.token_ids for c in found] == expected
    beams = {**asked, "num_beams": 2}
    expected = model.generate(torch.tensor(same), **beams)[:, 4:].tolist()
    assert [c.token_ids for c in engine.generate(same, **beams)] == expected


class Heard:
    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("decoding", ["plain", "lookup", "assist"])
def test_a_streamer_hears_what_it_hears_in_transformers(
    engine: jackfield.Engine, model: Any, decoding: str
) -> None:
    theirs, ours = Heard(), Heard()
    asked = {"max_new_tokens": 9, "do_sample": False}
    model.generate(torch.tensor([PROMPTS[0]]), streamer=theirs, **asked)
    (found,) = engine.generate(PROMPTS[0], decoding=decoding, streamer=ours, **asked)
    assert ours.puts == theirs.puts
    assert ours.ends == theirs.ends == 1
    assert len(found.token_ids) == 9


def test_a_streamer_of_several_texts_or_of_no_kind(engine: jackfield.Engine) -> None:
    heard = Heard()
    for call, words in (
        (lambda: engine.generate(PROMPTS, streamer=heard), "streamer is told one text, and 3"),
        (lambda: engine.generate(PROMPTS[0], streamer=print), "streamer must have put and end"),
        (
            lambda: engine.generate(PROMPTS[0], streamer=TextStreamer),
            "streamer is the class TextStreamer; give one",
        ),
        (
            lambda: engine.generate(
                PROMPTS[0], streamer=heard, num_return_sequences=2, temperature=1.0
            ),
            "and 2 are asked for",
        ),
        (lambda: engine.submit(PROMPTS[0], streamer=heard), "stream and submit can be iterated"),
        (lambda: engine.stream(PROMPTS[0], streamer=heard), "stream and submit can be iterated"),
    ):
        with pytest.raises(SettingsError, match=words):
            call()
    assert heard.puts == []

    class Full(Heard):
        def put(self, value: torch.Tensor) -> None:
            raise OSError("the pipe is closed")

    with pytest.raises(OSError, match="pipe"):
        engine.generate(PROMPTS[0], streamer=Full(), max_new_tokens=4)
    assert engine.generate(PROMPTS[0], max_new_tokens=4)[0].finish_reason == "length"


def test_max_time_is_a_deadline(engine: jackfield.Engine) -> None:
    def slow(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return scores

    for asked in (
        {"max_time": 0.3},
        {"generation_config": GenerationConfig(max_time=0.3)},
        {"deadline": 0.3},
    ):
        (found,) = engine.generate(PROMPTS[0], max_new_tokens=110, logits_processor=slow, **asked)
        assert found.finish_reason == "cancelled"
        assert "deadline of 0.3 s passed" in (found.error or "")
    (found,) = engine.generate(PROMPTS[0], stopping_criteria=MaxTimeCriteria(0.0), max_new_tokens=9)
    assert (len(found.token_ids), found.finish_reason) == (1, "stop")


def test_settings_that_name_a_decoding_choose_it(engine: jackfield.Engine) -> None:
    def chosen(**asked: Any) -> str:
        (found,) = engine.generate(PROMPTS[0], max_new_tokens=3, **asked)
        return found.report["decoding"].name

    assert chosen() == "plain"
    assert chosen(num_beams=1) == "plain"
    assert chosen(num_beams=3) == "beams"
    assert chosen(prompt_lookup_num_tokens=4) == "lookup"
    assert chosen(prompt_lookup_num_tokens=None, num_beams=None) == "plain"
    assert chosen(generation_config=GenerationConfig(prompt_lookup_num_tokens=4)) == "lookup"
    assert chosen(prompt_lookup_num_tokens=4, generation_config=GenerationConfig()) == ("lookup")
    engine.model.generation_config.prompt_lookup_num_tokens = 4  # data never selects code
    try:
        assert chosen() == "plain"
    finally:
        engine.model.generation_config.prompt_lookup_num_tokens = None


def test_what_is_not_there_is_answered_with_our_spelling(engine: jackfield.Engine) -> None:
    with jackfield.load(build("llama", torch.float64)) as bare:
        for name, value, words in (
            ("num_beams", 4, "'beam'"),
            ("prompt_lookup_num_tokens", 4, "'prompt_lookup'"),
        ):
            message = refusal(bare, **{name: value})
            assert f"does not honour {name}=4" in message
            assert "jackfield.load(decoding=" in message
            assert words in message
    assert "decoding='assisted', assistant_model=" in refusal(engine, assistant_model="demo-draft")
    assert "does not honour stopping_criteria" in refusal(
        engine, num_beams=2, stopping_criteria=lambda ids, scores: False
    )
    for name in ("past_key_values", "custom_generate", "synced_gpus", "tokenizer"):
        assert f"{name} is not a setting of a request" in refusal(engine, **{name: object()})


def test_a_file_that_asks_for_what_nothing_honours_is_lifted_with_none() -> None:
    for name, value in (
        ("token_healing", True),
        ("low_memory", True),
        ("num_beams", 3),
    ):
        model = build("llama", torch.float64)
        setattr(model.generation_config, name, value)
        with jackfield.load(model) as engine:
            message = refusal(engine)
            assert f"lift it with {name}=None" in message
            assert "generation_config sets" in message
            assert engine.generate(PROMPTS[0], max_new_tokens=2, **{name: None})


def test_what_has_no_name_is_answered(engine: jackfield.Engine) -> None:
    for second, words in (
        (GenerationConfig(max_new_tokens=2), r"write engine.generate\(prompt, generation_config=…"),
        ("another prompt", r"several prompts are one list: engine.generate\(\["),
    ):
        with pytest.raises(SettingsError, match=words):
            engine.generate(PROMPTS[0], second)
