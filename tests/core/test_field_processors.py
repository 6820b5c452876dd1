"""Fields that a processor of transformers does: the tokens of `generate`, whatever runs beside."""

from __future__ import annotations

import inspect
from typing import Any

import encoder_decoders
import pytest
import torch
from families import build, prompts
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
)

import jackfield
from jackfield.errors import SettingsError

PROMPTS = prompts((5, 13, 30, 1))
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
    {"remove_invalid_values": True, "suppress_tokens": [11, 12], "repetition_penalty": 1.5},
    {"forced_bos_token_id": 9},
    {
        "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.3, "repetition_penalty": 1.2,
        "min_new_tokens": 4, "eos_token_id": EOS, "suppress_tokens": [11, 12],
        "forced_eos_token_id": EOS, "exponential_decay_length_penalty": (1, 1.3),
    },
]  # fmt: skip


def is_right(asked: dict[str, Any]) -> bool:
    """Whether the installed `generate` does it: of 5.17, a decay makes an end that is not allowed
    no number, and what is in the prompt is penalized for the first beam alone."""
    decays = "isfinite" in inspect.getsource(ExponentialDecayLengthPenalty)
    beams = "repeat_interleave" in inspect.getsource(EncoderRepetitionPenaltyLogitsProcessor)
    if {"min_new_tokens", "exponential_decay_length_penalty"} <= asked.keys() and not decays:
        return False
    return beams or not {"num_beams", "encoder_repetition_penalty"} <= asked.keys()


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
@pytest.mark.one_in(4)
def test_tokens_are_those_of_generate(model: Any, cache: str, more: dict[str, Any]) -> None:
    """All of them in one batch, and a request beside them that asks for nothing."""
    searched = {"num_beams": 2} if more.get("decoding") == "beam" else {}
    asked = [{}, *FIELDS[:8], {"begin_suppress_tokens": firsts(model)}, *FIELDS[9:]]
    asked = [found for one in asked if is_right(found := {**one, **searched})]
    pairs = [(prompt, one) for prompt in PROMPTS for one in asked]
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
        ("forced_bos_token_id", [3, 4]),
        ("forced_bos_token_id", 10**9),
        ("remove_invalid_values", 1),
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


def broken(model: Any) -> Any:
    """A model that says what are no numbers: of all tokens behind some, of a few behind others."""
    head = model.lm_head

    def spoil(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        hidden = args[0].sum(-1)  # so that it depends on the tokens alone
        spoiled = logits.clone()
        spoiled[hidden > 0, 5:9] = float("nan")
        spoiled[hidden > 1] = float("nan")
        spoiled[hidden < -1, 20] = float("inf")
        return spoiled

    return head.register_forward_hook(spoil)


def test_scores_that_are_no_numbers(model: Any) -> None:
    """They are taken for others as in transformers; without it such a request ends."""
    model = build("llama")
    handle = broken(model)
    asked: list[dict[str, Any]] = [
        {"remove_invalid_values": True},
        {"remove_invalid_values": True, "suppress_tokens": list(range(9))},
        {"remove_invalid_values": True, "guidance_scale": 2.0},
        {"remove_invalid_values": True, "begin_suppress_tokens": [0]},
    ]
    pairs = [(prompt, one) for prompt in PROMPTS for one in asked]
    due = [right(model, prompt, **one) for prompt, one in pairs]
    with jackfield.load(model) as engine:
        found = engine.generate(
            [prompt for prompt, _ in pairs], settings=[one for _, one in pairs],
            max_new_tokens=NEW,
        )  # fmt: skip
        ended = engine.generate(PROMPTS, max_new_tokens=NEW)
    handle.remove()
    assert [one.token_ids for one in found] == due
    assert any("not numbers" in str(one.error) for one in ended)


def test_what_is_forced_is_forced_beside_prefix_allowed_tokens_fn(model: Any) -> None:
    asked: dict[str, Any] = {
        "prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1]) % 50 + 2, 3],
        "forced_eos_token_id": EOS,
    }
    more: list[dict[str, Any]] = [{}, {"forced_bos_token_id": 60, "begin_suppress_tokens": [3]}]
    pairs = [(prompt, {**asked, **one}) for prompt in PROMPTS for one in more]
    due = [right(model, prompt, **one) for prompt, one in pairs]
    with jackfield.load(model) as engine:
        found = engine.generate(
            [prompt for prompt, _ in pairs], settings=[one for _, one in pairs], max_new_tokens=NEW
        )
    assert [one.token_ids for one in found] == due
    assert all(tokens[-1] == EOS for tokens in due)


def test_models_with_an_encoder() -> None:
    """Whose decoders begin with one token, behind which the first one is forced."""
    asked: list[dict[str, Any]] = [
        {},
        {"forced_bos_token_id": 9, "begin_suppress_tokens": [5]},
        {"forced_bos_token_id": 9, "watermarking_config": {"bias": 4.0}},
        {"remove_invalid_values": True, "forced_eos_token_id": EOS},
    ]
    model = encoder_decoders.build("bart")
    size = model.config.vocab_size - 2
    texts = [[2 + token % size for token in prompt] for prompt in PROMPTS]
    pairs = [(prompt, one) for prompt in texts for one in asked]
    due = [
        encoder_decoders.generated(model, prompt, max_new_tokens=NEW, eos_token_id=EOS, **one)
        for prompt, one in pairs
    ]
    with jackfield.load(model) as engine:
        found = engine.generate(
            [prompt for prompt, _ in pairs], settings=[one for _, one in pairs],
            max_new_tokens=NEW, eos_token_id=EOS,
        )  # fmt: skip
        with pytest.raises(SettingsError, match=r"guidance_scale=2 leads.*an encoder reads"):
            engine.generate(texts[0], guidance_scale=2.0)
    assert [one.token_ids for one in found] == due
    assert due[1][0] == 9


def test_a_decay_needs_an_end(model: Any) -> None:
    with (
        jackfield.load(model) as engine,
        pytest.raises(SettingsError, match="there is no eos_token_id"),
    ):
        engine.generate(PROMPTS[0], exponential_decay_length_penalty=(3, 1.1), eos_token_id=None)
