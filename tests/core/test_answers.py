"""Answers lead somewhere: what `load` sends to a call is taken there, and each row is reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import departures
import pytest
import torch
from driven import ways
from families import build
from transformers import GenerationConfig

import jackfield
from jackfield.api import LoadArguments, PlanArguments
from jackfield.contracts import Sequence, StepBlock
from jackfield.errors import JackfieldError, PromptError, UsageError
from jackfield.requests.arguments import OF_LOADING
from jackfield.requests.habits import KEYWORDS, PROMPTS
from jackfield.requests.honouring import Limits
from jackfield.requests.settings import resolve
from jackfield.requests.vocabulary import ALIASES, ARGUMENTS, CODE, OF_SPEECH, OWN, REFUSED
from jackfield.requests.wishes import VOCABULARY, wishes
from jackfield.sampling.pipeline import Pipeline
from jackfield.sampling.rows import RowMap

STRANGE = object()  # a value that nothing takes
SHORT: dict[str, Any] = {"max_new_tokens": 2}
PAGES = Path(__file__).parents[2] / "docs"
#: A value with which a request honours a setting, and what must stand beside it.
HONOURED: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, value in {
        "bad_words_ids": [[5]], "begin_suppress_tokens": [5], "bos_token_id": 1,
        "encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2,
        "exponential_decay_length_penalty": (2, 1.1), "forced_bos_token_id": 1,
        "forced_eos_token_id": 1, "guidance_scale": 1.5, "remove_invalid_values": True,
        "watermarking_config": {"bias": 1.0},
        "no_repeat_ngram_size": 2, "cache_salt": "a", "choices": ["a", "b"],
        "deadline": 60.0, "decoder_start_token_id": 1, "do_sample": True, "eos_token_id": 5,
        "frequency_penalty": 0.5, "grammar": 'start: "a"', "json_schema": {"type": "object"},
        "logprobs": 1, "max_length": 30, "max_new_tokens": 3, "max_time": 60.0, "min_length": 1,
        "min_new_tokens": 1, "min_p": 0.1, "pad_token_id": 0, "presence_penalty": 0.5,
        "priority": 1, "regex": "a+", "repetition_penalty": 1.2, "seed": 1,
        "sequence_bias": {(5,): 1.0}, "stop": ["x"], "stop_strings": ["x"], "suppress_tokens": [5],
        "temperature": 0.5, "top_k": 5, "top_p": 0.5, "transformers_version": "5",
        "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "renormalize_logits": True, "top_h": 0.5,
        "output_logits": True, "output_scores": True, "output_hidden_states": True,
        "output_attentions": True,
        "typical_p": 0.5,
    }.items()},
    "diversity_penalty": {"diversity_penalty": 0.5, "num_beams": 2, "num_beam_groups": 2},
    "num_beam_groups": {"diversity_penalty": 0.5, "num_beams": 2, "num_beam_groups": 2},
    "negative_prompt": {"negative_prompt": "x", "guidance_scale": 1.5},
    "negative_prompt_ids": {"negative_prompt_ids": [[5, 6]], "guidance_scale": 1.5},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[jackfield.Engine]:
    offered = {"sample": "sample", "beam": "beam"}
    with jackfield.load("demo", decoding=offered) as found:
        yield found


def said(call: Any, *arguments: Any, **keywords: Any) -> str:
    """The words with which a call is refused; empty where it is taken."""
    try:
        call(*arguments, **keywords)
    except (JackfieldError, TypeError) as error:
        return str(error)
    return ""


# What Whisper is told no other model takes; its own tests are in `test_whisper.py`.
@pytest.mark.parametrize(
    "name", sorted((VOCABULARY | OWN | ALIASES.keys() | ARGUMENTS.keys()) - {*OF_SPEECH})
)
def test_what_load_sends_to_a_call_is_taken_there(engine: jackfield.Engine, name: str) -> None:
    value = HONOURED.get(name, {}).get(name, STRANGE)
    answer = said(jackfield.load, **{name: value})
    if "is a setting of a request, not of loading" in answer:
        asked = {**SHORT, **HONOURED[name]}
        assert engine.generate("Once upon a time", **asked)
    elif name in REFUSED or (name in CODE and name not in KEYWORDS and "no model" not in answer):
        own = REFUSED.get(name) or CODE[name]
        assert own in answer
        assert own in said(engine.generate, "Hello", **{name: value})


@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_a_call_answers_what_load_answers(engine: jackfield.Engine, name: str) -> None:
    habit = KEYWORDS[name]
    for value in habit.inert:
        if name not in CODE:
            assert engine.generate("Hello", **{name: value}, **SHORT)
    answer = said(engine.generate, "Hello", **{name: STRANGE})
    assert name in answer
    assert "there is no setting" not in answer
    if name not in {
        *PROMPTS,
        *ARGUMENTS,
        *CODE,
        *OWN,
        "generation_config",
    } and "a call, not" not in (habit.answer):
        assert (habit.ours or habit.answer) in answer


def test_a_call_answers_the_arguments_of_load(engine: jackfield.Engine) -> None:
    assert {*LoadArguments.__annotations__, *PlanArguments.__annotations__} == OF_LOADING
    for name in OF_LOADING - {"decoding"}:
        assert "jackfield.load" in said(engine.generate, "Hello", **{name: STRANGE})
        assert engine.generate("Hello", **{name: None}, **SHORT)


def rows(page: str) -> list[str]:
    """The names in the first column of the page's tables."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return [name for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.M)
            for name in re.findall(r"\w+", row)]  # fmt: skip


def test_every_row_of_the_pages_is_reached(engine: jackfield.Engine) -> None:
    """Typed with and without a prompt or a model, each name is taken or answered as it stands."""
    names = {*rows("departures.md"), *rows("coming-from-transformers.md")}
    assert {"inputs_embeds", "typical_p", "pretrained_model_name_or_path", "tools"} <= names
    for name in names & (KEYWORDS.keys() | VOCABULARY | ARGUMENTS.keys()):
        answers = [
            said(engine.generate, "Hello", **{name: STRANGE}),
            said(engine.generate, **{name: STRANGE}),
            said(engine.generate, ["Hello"], settings=[{name: STRANGE}]),
            said(engine.submit, "Hello", **{name: STRANGE}),
            said(jackfield.load, **{name: STRANGE}),
        ]
        for answer in answers:
            assert "there is no setting" not in answer, name
            assert "takes no argument" not in answer, name
        for table in (CODE, ARGUMENTS, REFUSED):
            if name in table and name != "prefill_chunk_size":
                assert any(table[name] in answer for answer in answers), name
        if name in KEYWORDS and KEYWORDS[name].answer:
            assert KEYWORDS[name].answer in answers[-1], name


def test_prompts_may_be_named(engine: jackfield.Engine) -> None:
    ids = engine.tokenizer("Once upon a time")["input_ids"]
    (expected,) = engine.generate(ids, **SHORT)
    rows_of = torch.tensor([[0, *ids]])
    mask = torch.tensor([[0] + [1] * len(ids)])
    for name in PROMPTS:
        for given in ({name: ids}, {name: rows_of, "attention_mask": mask}):
            assert engine.generate(**given, **SHORT)[0].token_ids == expected.token_ids
        assert engine.submit(**{name: ids}, **SHORT).result().token_ids == expected.token_ids
        with pytest.raises((PromptError, TypeError), match=f"{name} beside it|multiple values"):
            engine.generate("Hello", **{name: "Hello"})
    for call in ways(engine):
        with pytest.raises(PromptError, match="there is no prompt"):
            call()
        with pytest.raises(UsageError, match="prompts are texts, token ids or chat messages"):
            call(inputs_embeds=torch.zeros(1, 2, 3))
    with pytest.raises(PromptError, match="attention_mask and no prompt"):
        engine.generate(attention_mask=mask)


@pytest.mark.parametrize("call", [jackfield.load, jackfield.plan])
def test_a_model_that_is_not_given(call: Any) -> None:
    assert "there is no model" in said(call)
    assert "('MODEL')" in said(call, pretrained_model_name_or_path="demo")
    assert "did you mean 'dtype'" in said(call, dtyp="float32")


def test_the_advice_about_a_chat_template_works(engine: jackfield.Engine) -> None:
    messages = [{"role": "user", "content": "Sort these numbers: 41 7 88 23"}]
    advice = KEYWORDS["chat_template"].answer.partition(": ")[2].replace("…", "None")
    found = eval(advice, {"engine": engine, "messages": messages})  # noqa: S307 - ours
    assert found[0].token_ids == engine.generate(messages)[0].token_ids


WARPED = {
    "typical_p": 0.6, "epsilon_cutoff": 0.08, "eta_cutoff": 0.4, "top_h": 0.05,
    "renormalize_logits": True,
}  # fmt: skip


def drawn_from(given: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """The probabilities of the tokens that a request draws, behind a prompt of one token."""
    own = GenerationConfig(do_sample=True, temperature=0.2, top_k=2)
    honoured = frozenset(departures.honoured())
    settings = resolve(
        wishes(given, own), 1, Limits(logits.shape[-1], 64, honoured, "sample", False)
    )
    rows = RowMap.verifying([Sequence(0, [1], settings)])
    pipeline = Pipeline.of(rows, logits.shape[-1], StepBlock(logits.device))
    assert pipeline.settled.sampled is not None
    return pipeline.settled.sampled.warpers(pipeline.processed(logits)[0]).softmax(-1)


@pytest.mark.parametrize("name", sorted(WARPED))
@pytest.mark.parametrize("temperature", [3.0, 0.7])
def test_tokens_are_drawn_from_the_distribution_of_transformers(
    name: str, temperature: float
) -> None:
    asked: dict[str, Any] = {"temperature": temperature, "top_k": 12, "top_p": 0.9, "min_p": 0.01}
    model = build("llama", torch.float32)
    size = model.config.vocab_size
    given = {**asked, name: WARPED[name]}
    config = GenerationConfig(do_sample=True, **given)
    expected = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(3)) * 2
    found = drawn_from({"do_sample": True, **given}, logits)
    wanted = expected(torch.tensor([[1]]), logits.clone()).softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    plain = drawn_from({"do_sample": True, **asked}, logits)
    assert not torch.allclose(plain, wanted) or name == "renormalize_logits"
