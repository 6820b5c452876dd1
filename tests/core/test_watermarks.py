"""Watermarks: the tokens of `generate`, in any company, and transformers' detector finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import build, prompts
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

import jackfield
from jackfield.errors import SettingsError

PROMPTS = prompts((5, 13, 30))
NEW, EOS = 12, 7
GREEN = {"bias": 3.0, "greenlist_ratio": 0.5}
SYNTHID = {"ngram_len": 3, "keys": [654, 400, 836, 123, 340, 443, 597, 160, 57]}
CONFIGS: list[Any] = [
    GREEN,
    {"bias": 4.0, "seeding_scheme": "selfhash", "context_width": 2},
    WatermarkingConfig(bias=2.5, hashing_key=15),
    SYNTHID,
    SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 5, 9], skip_first_ngram_calls=True),
]
BESIDE = {"repetition_penalty": 1.3, "suppress_tokens": [5, 6], "no_repeat_ngram_size": 2}


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def object_of(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    made = SynthIDTextWatermarkingConfig if "keys" in config else WatermarkingConfig
    return made(**config)


def right(model: Any, prompt: list[int], config: Any, **asked: Any) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
        watermarking_config=config and object_of(config), **asked,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "more",
    [
        {"cache_implementation": "paged"},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "paged?page_size=4&num_tokens=104"},
        {"decoding": "prompt_lookup?min_acceptance_rate=0&max_matching_ngram_size=1"},
        {"max_batch_size": 2, "max_batch_tokens": 8},
        {"deterministic": True},
    ],
    ids=str,
)
@pytest.mark.one_in(4)
def test_tokens_are_those_of_generate(model: Any, more: dict[str, Any]) -> None:
    """All kinds in one batch, beside requests without any."""
    asked = [(config, own) for config in [None, *CONFIGS] for own in ({}, BESIDE)]
    pairs = [(prompt, config, own) for prompt in PROMPTS for config, own in asked]
    due = [right(model, prompt, config, **own) for prompt, config, own in pairs]
    assert len(set(map(str, due))) > len(due) // 2
    with jackfield.load(model, **more) as engine:
        found = engine.generate(
            [prompt for prompt, _, _ in pairs],
            settings=[{"watermarking_config": config, **own} for _, config, own in pairs],
            max_new_tokens=NEW,
        )
        assert [one.token_ids for one in found] == due
        if "decoding" in more:
            guesses = engine.statistics().speculation
            assert guesses is not None
            assert guesses.accepted


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.one_in(4)
def test_tokens_are_drawn_from_what_generate_draws_from(model: Any, config: Any) -> None:
    """After temperature and all that narrows; each text of a prompt has a memory of its own."""
    shape = {"temperature": 1.6, "top_k": 40, "top_p": 0.95}
    with jackfield.load(model) as engine:
        found = engine.generate(
            PROMPTS[1], num_return_sequences=3, seed=4, max_new_tokens=NEW, output_scores=True,
            watermarking_config=config, **shape,
        )  # fmt: skip
    assert len({tuple(one.token_ids) for one in found}) == 3
    for one in found:
        own = GenerationConfig(do_sample=True, watermarking_config=object_of(config), **shape)
        processors = model._get_logits_processor(
            own, input_ids_seq_length=len(PROMPTS[1]), device="cpu"
        )
        assert one.scores is not None
        for at in range(len(one.token_ids)):
            ids = torch.tensor([[*PROMPTS[1], *one.token_ids[:at]]])
            with torch.no_grad():
                scores = processors(ids, model(ids).logits[:, -1].float())
            torch.testing.assert_close(
                one.scores[at].softmax(-1), scores[0].softmax(-1), rtol=1e-3, atol=1e-6
            )


def test_the_detector_finds_it(model: Any) -> None:
    config = WatermarkingConfig(bias=5.0)
    sizes = transformers.LlamaConfig(vocab_size=model.config.vocab_size, bos_token_id=1)
    detector = transformers.WatermarkDetector(
        model_config=sizes, device="cpu", watermarking_config=config
    )
    with jackfield.load(model) as engine:
        marked, plain = engine.generate(
            [PROMPTS[0]] * 2, settings=[{"watermarking_config": config}, {}],
            max_new_tokens=90, temperature=1.5, seed=1, eos_token_id=[],
        )  # fmt: skip
    assert detector(torch.tensor([marked.token_ids])).tolist() == [True]
    assert detector(torch.tensor([plain.token_ids])).tolist() == [False]


def test_synthid_shows_in_what_its_detectors_read(model: Any) -> None:
    """The mean g-value of a text is a half where nothing is marked."""
    config = SynthIDTextWatermarkingConfig(**SYNTHID)  # type: ignore[arg-type]
    reader = config.construct_processor(model.config.vocab_size, "cpu")
    with jackfield.load(model) as engine:
        marked, plain = engine.generate(
            [PROMPTS[0]] * 2, settings=[{"watermarking_config": config}, {}],
            max_new_tokens=90, temperature=1.5, seed=1, eos_token_id=[],
        )  # fmt: skip
    means = [
        float(reader.compute_g_values(torch.tensor([one.token_ids])).float().mean())
        for one in (marked, plain)
    ]
    assert means[0] > 0.55
    assert abs(means[1] - 0.5) < 0.05


def test_a_structure_holds(model: Any) -> None:
    with jackfield.load("demo") as engine:
        for config in CONFIGS:
            (one,) = engine.generate(
                "Once upon a time", regex="[a-z]{9,12}", watermarking_config=config,
                temperature=2.0, seed=3,
            )  # fmt: skip
            assert one.finish_reason == "stop"
            assert one.text.isalpha()
            assert 9 <= len(one.text) <= 12


def test_where_no_token_can_come(model: Any) -> None:
    """It is told as without a watermark, and neighbours go on."""
    every = list(range(model.config.vocab_size))
    with jackfield.load(model) as engine:
        none, one = engine.generate(
            [PROMPTS[0]] * 2, settings=[{"suppress_tokens": every}, {}],
            watermarking_config=GREEN, max_new_tokens=NEW,
        )  # fmt: skip
    assert "every token" in str(none.error)
    assert one.token_ids == right(model, PROMPTS[0], GREEN)


def test_a_config_says_it_too(model: Any) -> None:
    due = right(model, PROMPTS[0], GREEN)
    config = GenerationConfig(watermarking_config=object_of(GREEN))
    own = build("llama")
    own.generation_config.watermarking_config = object_of(GREEN)
    with jackfield.load(own) as engine:
        (one,) = engine.generate(PROMPTS[0], max_new_tokens=NEW)
        (lifted,) = engine.generate(PROMPTS[0], max_new_tokens=NEW, watermarking_config=None)
    with jackfield.load(model) as engine:
        (other,) = engine.generate(PROMPTS[0], max_new_tokens=NEW, generation_config=config)
    assert [one.token_ids, other.token_ids] == [due, due]
    assert lifted.token_ids == right(model, PROMPTS[0], None) != due


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("green", "must be a WatermarkingConfig"),
        (True, "must be a WatermarkingConfig"),
        ({"a": 1}, "WatermarkingConfig has no 'a'; it has greenlist_ratio, bias"),
        ({"bias": "x"}, "bias must be a number"),
        ({"bias": float("inf")}, "bias must be a finite"),
        ({"greenlist_ratio": 1.0}, "greenlist_ratio must be less than 1"),
        ({"greenlist_ratio": 0}, "greenlist_ratio must be more than 0"),
        ({"seeding_scheme": "other"}, "seeding_scheme must be one of lefthash, selfhash"),
        ({"context_width": 0}, "context_width must be at least 1"),
        ({"hashing_key": 2**64}, "hashing_key must be at most"),
        ({"ngram_len": 5}, "needs keys"),
        ({"keys": [1]}, "needs ngram_len"),
        ({"ngram_len": 1, "keys": [1]}, "ngram_len must be at least 2"),
        ({"ngram_len": 5, "keys": []}, "keys must be 1 to"),
        ({"ngram_len": 5, "keys": [0.5]}, "keys must be 1 to"),
        ({"ngram_len": 5, "keys": [1], "bias": 2.0}, "SynthIDTextWatermarkingConfig has no 'bias'"),
        ({"ngram_len": 5, "keys": [1], "sampling_table_size": 2**30}, "sampling_table_size must"),
        ({"ngram_len": 5, "keys": [1], "debug_mode": 1}, "debug_mode must be True or False"),
    ],
    ids=str,
)
def test_odd_values(model: Any, config: Any, text: str) -> None:
    with (
        jackfield.load(model) as engine,
        pytest.raises(SettingsError, match=text) as caught,
    ):
        engine.generate(PROMPTS[0], max_new_tokens=2, watermarking_config=config)
    assert str(caught.value).startswith("watermarking_config: ")
    assert "\n" not in str(caught.value)


def test_a_text_that_is_searched_has_none(model: Any) -> None:
    with (
        jackfield.load(model, decoding="beam") as engine,
        pytest.raises(SettingsError, match="'beam' does not honour watermarking_config"),
    ):
        engine.generate(PROMPTS[0], max_new_tokens=2, watermarking_config=GREEN)
