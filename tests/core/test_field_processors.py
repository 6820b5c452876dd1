"""Fields that a processor of transformers does: the tokens of `generate`, whatever runs beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, prompts
from transformers import GenerationConfig

import jackfield
from jackfield.errors import SettingsError

PROMPTS = prompts((5, 13, 30))
NEW, EOS = 14, 7
FIELDS: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 1.8},
    {"encoder_repetition_penalty": 0.5},
    {"forced_eos_token_id": EOS},
    {"forced_eos_token_id": [EOS, 9]},
    {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": EOS},
    {"begin_suppress_tokens": []},
    {
        "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.3, "repetition_penalty": 1.2,
        "min_new_tokens": 4, "eos_token_id": EOS, "suppress_tokens": [11, 12],
        "forced_eos_token_id": EOS, "exponential_decay_length_penalty": (1, 1.3),
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def right(model: Any, prompt: list[int], **asked: Any) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
        **{"do_sample": False, **asked},
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def firsts(model: Any) -> list[int]:
    return [right(model, prompt)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("more", [{}, {"decoding": "prompt_lookup"}, {"decoding": "beam"}], ids=str)
@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_tokens_are_those_of_generate(model: Any, cache: str, more: dict[str, Any]) -> None:
    """All of them in one batch, and a request beside them that asks for nothing."""
    searched = {"num_beams": 2} if more.get("decoding") == "beam" else {}
    asked = [{}, *FIELDS[:8], {"begin_suppress_tokens": firsts(model)}, *FIELDS[9:]]
    pairs = [(prompt, {**one, **searched}) for prompt in PROMPTS for one in asked]
    wanted = [right(model, prompt, **one) for prompt, one in pairs]
    assert len(set(map(str, wanted[: len(asked)]))) > len(asked) // 2
    with jackfield.load(model, cache_implementation=cache, **more) as engine:
        found = engine.generate(
            [prompt for prompt, _ in pairs], settings=[one for _, one in pairs],
            max_new_tokens=NEW,
        )  # fmt: skip
    for (_, one), completion, tokens in zip(pairs, found, wanted, strict=True):
        assert completion.token_ids == tokens, one


def test_a_config_says_it_too(model: Any) -> None:
    for config in (GenerationConfig(no_repeat_ngram_size=1), None):
        if config is None:
            model.generation_config.no_repeat_ngram_size = 1
        try:
            wanted = [right(model, PROMPTS[1], no_repeat_ngram_size=size) for size in (1, 0)]
            given = {} if config is None else {"generation_config": config}
            with jackfield.load(model) as engine:
                (one,) = engine.generate(PROMPTS[1], max_new_tokens=NEW, **given)
                (lifted,) = engine.generate(
                    PROMPTS[1], max_new_tokens=NEW, no_repeat_ngram_size=None, **given
                )
            assert [one.token_ids, lifted.token_ids] == wanted
            assert wanted[0] != wanted[1]
        finally:
            model.generation_config.no_repeat_ngram_size = None


def test_samples_and_chunks(model: Any) -> None:
    """Samples of one prompt share what was made of it; a prompt is read in pieces."""
    with jackfield.load(model, max_batch_tokens=8, max_batch_size=4) as engine:
        found = engine.generate(
            PROMPTS[2], num_return_sequences=3, temperature=0.01, seed=1, max_new_tokens=NEW,
            encoder_no_repeat_ngram_size=1, no_repeat_ngram_size=2,
        )  # fmt: skip
    for one in found:
        assert set(one.token_ids).isdisjoint(PROMPTS[2])
        grams = list(zip(one.token_ids, one.token_ids[1:], strict=False))
        assert len(set(grams)) == len(grams)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", True),
        ("no_repeat_ngram_size", "2"),
        ("encoder_no_repeat_ngram_size", 1.5),
        ("encoder_repetition_penalty", 0),
        ("encoder_repetition_penalty", float("nan")),
        ("forced_eos_token_id", 10**9),
        ("forced_eos_token_id", "x"),
        ("begin_suppress_tokens", [-1]),
        ("exponential_decay_length_penalty", (3,)),
        ("exponential_decay_length_penalty", (3, 0.0)),
        ("exponential_decay_length_penalty", (3.0, 1.1)),
        ("exponential_decay_length_penalty", 3),
    ],
)
def test_odd_values(model: Any, name: str, value: Any) -> None:
    with (
        jackfield.load(model) as engine,
        pytest.raises(SettingsError, match=name),
    ):
        engine.generate(PROMPTS[0], max_new_tokens=2, eos_token_id=EOS, **{name: value})


def test_a_decay_needs_an_end(model: Any) -> None:
    with (
        jackfield.load(model) as engine,
        pytest.raises(SettingsError, match="there is no eos_token_id"),
    ):
        engine.generate(PROMPTS[0], exponential_decay_length_penalty=(3, 1.1), eos_token_id=None)
