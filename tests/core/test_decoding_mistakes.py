"""A mistake about decodings is one line that names it, before a weight is read or a token made."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import transformers
from drafting import draft_of, model_of, small_draft
from families import build, character_tokenizer, config_of, prompts

import jackfield
from jackfield.contracts import Settings, Strategy
from jackfield.engine.checked import CheckedStrategy
from jackfield.engine.sequences import RunningSequence
from jackfield.errors import (
    CheckpointError,
    ExecutionError,
    JackfieldError,
    OptionError,
    PlanError,
    PluginError,
    SelectionError,
    SettingsError,
    UsageError,
)

MODEL = functools.partial(model_of, "llama")
DRAFT = functools.partial(draft_of, "llama")


def assert_wrong(error: type[JackfieldError], text: str, call: Any) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.search(text, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"decoding": "assisted"}, UsageError, "needs a draft model; give assistant_model="),
        ({"decoding": {"a": "sample", "b": "assisted"}}, UsageError, "'b' needs a draft model"),
        ({"decoding": "sample", "assistant_model": "demo-draft"}, UsageError, "used by none of"),
        ({"decoding": "prompt_lookup", "assistant": {"dtype": "float32"}}, UsageError, "none of"),
        ({"decoding": "prompt_lokup"}, SelectionError, "did you mean 'prompt_lookup'"),
        ({"decoding": {}}, SelectionError, "an empty mapping offers no decoding"),
        ({"decoding": {"": "sample"}}, SelectionError, "'' is none"),
        ({"decoding": {3: "sample"}}, SelectionError, "3 is none"),
        ({"decoding": {"sample": "prompt_lookup"}}, SelectionError, "stands for plain decoding"),
        ({"decoding": {"a": "sample", "b": "beem"}}, SelectionError, "no decoding 'beem'"),
        ({"cache_implementation": {"a": "paged"}}, SelectionError, "only decodings are offered"),
        ({"decoding": "prompt_lookup?prompt_lookup_num_tokens=0"}, OptionError, "at least 1"),
        ({"decoding": "prompt_lookup?ngrams=2"}, OptionError, "no option 'ngrams'"),
        ({"decoding": "assisted?num_assistant_tokens=0"}, OptionError, "at least 1, not 0"),
        ({"decoding": "assisted?num_assistant_tokens_schedule=x"}, OptionError, "one of constant"),
        ({"decoding": "assisted?assistant_confidence_threshold=2"}, OptionError, "from 0 to 1"),
        ({"decoding": "prompt_lookup?min_acceptance_rate=7"}, OptionError, "share from 0 to 1"),
        ({"decoding": "prompt_lookup?min_speedup=-1"}, OptionError, "0 or more, not -1"),
        ({"decoding": "assisted?min_speedup=inf"}, OptionError, "number"),
        ({"decoding": "prompt_lookup", "cache_implementation": "static"}, PlanError, "rollback"),
        ({"decoding": {"a": "sample", "b": "prompt_lookup"}, "cache_implementation": "static"},
         PlanError, "rollback"),
        ({"decoding": "prompt_lookup", "deterministic": True}, PlanError, "deterministic=True"),
        ({"decoding": {"a": "sample", "b": "prompt_lookup"}, "deterministic": True},
         PlanError, "deterministic=True"),
    ],
)  # fmt: skip
def test_selections(arguments: dict[str, Any], error: type[JackfieldError], text: str) -> None:
    assert_wrong(error, text, lambda: jackfield.plan(config_of("llama"), **arguments))
    assert_wrong(error, text, lambda: jackfield.load(MODEL(), **arguments))


@pytest.mark.parametrize(
    ("assistant", "error", "text"),
    [
        ({"atn_implementation": "sdpa"}, UsageError, "did you mean 'attn_implementation'"),
        ({"decoding": "sample"}, UsageError, "no key 'decoding'"),
        ({"cache_implementation": "static"}, PlanError, "assistant_model: .*rollback"),
        ({"attn_implementation": "spda"}, SelectionError, "assistant_model: .*'sdpa'"),
        ({"dtype": "float23"}, UsageError, "assistant_model: .*dtype must be"),
        (["dtype"], UsageError, "must be a mapping"),
        ({"adapter": "x"}, UsageError, "give the draft model with it, as a live model"),
    ],
)
def test_how_the_draft_model_runs(assistant: Any, error: type[JackfieldError], text: str) -> None:
    chosen = {"decoding": "assisted", "assistant_model": "demo-draft", "assistant": assistant}
    assert_wrong(error, text, lambda: jackfield.plan("demo", **chosen))
    assert_wrong(error, text, lambda: jackfield.load("demo", **chosen))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("no/such/model", "assistant_model: cannot find the model 'no/such/model'"),
        ("./nowhere", "assistant_model: ./nowhere is not a folder"),
        (7, "assistant_model: cannot load int"),
        ("", "assistant_model: the model's name is empty"),
    ],
)
def test_a_draft_model_that_is_none(model: Any, text: str) -> None:
    chosen = {"decoding": "assisted", "assistant_model": model}
    assert_wrong(CheckpointError, text, lambda: jackfield.load("demo", **chosen))


def test_vocabularies_that_do_not_go_together() -> None:
    other = small_draft(vocab=77)
    chosen = {"decoding": "assisted", "assistant_model": other}
    text = "a vocabulary of 77 tokens where the model has 120, and the model has no tokenizer"
    assert_wrong(UsageError, text, lambda: jackfield.load(MODEL(), **chosen))
    tokenizer = character_tokenizer()
    text = "the assistant model has no tokenizer"
    assert_wrong(UsageError, text, lambda: jackfield.load(MODEL(), tokenizer=tokenizer, **chosen))


def test_a_tokenizer_with_more_tokens_than_the_draft_model() -> None:
    chosen = {
        "decoding": "assisted", "assistant_model": small_draft(vocab=5),
        "assistant": {"tokenizer": character_tokenizer()},
    }  # fmt: skip
    text = r"a vocabulary of 5 tokens where its tokenizer has \d+; give the tokenizer that it was"
    assert_wrong(UsageError, text, lambda: jackfield.load("demo", **chosen))


def test_a_token_that_was_added_is_not_handed_to_the_draft_model() -> None:
    tokenizer = character_tokenizer()
    draft = small_draft(vocab=tokenizer.vocab_size)
    tokenizer.add_tokens(["once"])
    with jackfield.load(
        "demo", decoding="assisted", assistant_model=draft, assistant={"tokenizer": tokenizer}
    ) as engine:
        alone = jackfield.load("demo")
        for text in ("and once more", "and more"):
            (found,) = engine.generate(text, max_new_tokens=6)
            assert found.token_ids == alone.generate(text, max_new_tokens=6)[0].token_ids
        alone.close()


def test_a_draft_model_that_fails_is_named() -> None:
    draft = small_draft(vocab=120)

    def fail(*_: Any) -> None:
        raise KeyError("gone")

    with jackfield.load(MODEL(), decoding="assisted", assistant_model=draft) as engine:
        hook = draft.register_forward_pre_hook(fail)
        text = "assisted.*: assistant_model, a LlamaForCausalLM, raised KeyError: 'gone'; mend it"
        with pytest.raises(ExecutionError, match=text):
            engine.generate(prompts((3,)), max_new_tokens=4)
        hook.remove()
        assert engine.generate(prompts((3,)), max_new_tokens=4)[0].finish_reason == "length"


def test_a_model_does_not_assist_itself() -> None:
    model = build("llama")
    chosen = {"decoding": "assisted", "assistant_model": model}
    assert_wrong(UsageError, "is the model itself", lambda: jackfield.load(model, **chosen))
    with jackfield.load(model) as engine:  # nothing is left of the attempt
        assert engine.generate(prompts((3,)), max_new_tokens=2)[0].finish_reason == "length"


def test_a_draft_model_is_given_back_as_it_was() -> None:
    draft = build("llama").train()
    before = draft.config._attn_implementation
    chosen: dict[str, Any] = {"decoding": "assisted", "assistant_model": draft}
    with jackfield.load(MODEL(), **chosen):
        assert not draft.training
        assert_wrong(UsageError, "already runs in an engine", lambda: jackfield.load(draft))
        assert_wrong(UsageError, "already runs in an engine",
              lambda: jackfield.load(build("llama"), **chosen))  # fmt: skip
    assert draft.training
    assert draft.config._attn_implementation == before


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"decoding": "beam"}, "'beam' is not offered by this engine, which has look, assist, s"),
        ({"decoding": "loook"}, "did you mean 'look'"),
        ({"decoding": "prompt_lookup"}, "is not offered by this engine"),
        ({"decoding": 7}, "7 is not offered"),
        ({"decoding": ["look"]}, "is not offered"),
        ({"prompt_lookup_num_tokens": 0}, "at least 1, not 0"),
        ({"prompt_lookup_num_tokens": True}, "must be a whole number"),
        ({"max_matching_ngram_size": -1}, "at least 1, not -1"),
        ({"num_assistant_tokens": 3}, "'look' does not honour num_assistant_tokens=3"),
        ({"decoding": "sample", "prompt_lookup_num_tokens": 3}, "'sample' does not honour"),
        ({"decoding": "assist", "num_assistant_tokens": 0}, "at least 1, not 0"),
        ({"decoding": "assist", "num_assistant_tokens_schedule": "up"}, "must be one of constant"),
        ({"decoding": "assist", "assistant_confidence_threshold": 1.5}, "at most 1, not 1.5"),
        ({"decoding": "assist", "assistant_confidence_threshold": "x"}, "must be a number"),
        ({"decoding": "assist", "assistant_lookbehind": 3}, "does not honour assistant_lookbehind"),
        ({"decoding": "assist", "assistant_early_exit": 1}, "does not honour assistant_early_exit"),
    ],
)
def test_settings_of_a_request(settings: dict[str, Any], text: str) -> None:
    offered = {"look": "prompt_lookup", "assist": "assisted"}
    with jackfield.load(MODEL(), decoding=offered, assistant_model=DRAFT()) as engine:
        assert_wrong(SettingsError, text, lambda: engine.submit(prompts((4,))[0], **settings))


def test_settings_of_a_request_that_are_honoured() -> None:
    """Under transformers' names, also from one of its config objects."""
    offered = {
        "look": "prompt_lookup?min_acceptance_rate=0",
        "assist": "assisted?min_acceptance_rate=0",
    }
    asked = transformers.GenerationConfig(prompt_lookup_num_tokens=2, max_matching_ngram_size=1)
    text = prompts((3,))[0] * 4
    with jackfield.load(MODEL(), decoding=offered, assistant_model=DRAFT()) as engine:
        longest = []
        inner = engine._loop.decoding.propose

        def propose(sequences: Any) -> Any:
            found = inner(sequences)
            longest.append(max(map(len, found)))
            return found

        engine._loop.decoding.propose = propose
        for settings, most in (
            ({"generation_config": asked}, 2),
            ({"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}, 5),
            ({"decoding": "assist", "num_assistant_tokens": 3,
              "assistant_confidence_threshold": 0.0}, 3),
            ({"decoding": "assist", "assistant_confidence_threshold": 1.0}, 1),
            ({"decoding": "assist", "num_assistant_tokens_schedule": "heuristic",
              "num_assistant_tokens": 1, "assistant_confidence_threshold": 0.0}, None),
        ):  # fmt: skip
            longest.clear()
            engine.generate(text, max_new_tokens=24, **settings)
            assert max(longest) == most or (most is None and max(longest) >= 3)


class Broken(Strategy):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        return self.answer() if callable(self.answer) else self.answer


@pytest.mark.parametrize(
    "answer", [[], [[1], [2]], [[1, 2, 3]], [[-1]], [[50]], [["a"]], [[True]], [None], None,
               lambda: 1 / 0],
)  # fmt: skip
def test_a_strategy_that_breaks_its_contract_is_an_error_by_name(answer: Any) -> None:
    strategy = CheckedStrategy(Broken(answer), "decoding 'bad' of outside 1.0", 50)
    one = RunningSequence(0, [5, 6], Settings(max_new_tokens=4))
    with pytest.raises(PluginError, match=r"decoding 'bad' of outside 1\.0: propose "):
        strategy.propose([one], [2])
    assert CheckedStrategy(Broken([[49, 0]]), "x", 50).propose([one], [2]) == [[49, 0]]
