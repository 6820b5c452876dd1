"""A `GenerationConfig`, a caller's and a model's own, means what it means to `generate`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

import jackfield
from jackfield.contracts import Settings, StepBlock
from jackfield.engine.sequences import RunningSequence
from jackfield.errors import PromptError, SettingsError
from jackfield.requests.honouring import Limits
from jackfield.requests.settings import resolve
from jackfield.requests.wishes import wishes
from jackfield.sampling.pipeline import Pipeline
from jackfield.sampling.rows import RowMap
from jackfield_plugins.decoding.sample import Sample

PROMPT = [5, 6, 7, 8, 5, 9]
VOCAB = 120
LIMITS = Limits(VOCAB, 128, Sample.capabilities.settings, "sample", has_tokenizer=False)
TOKENS = st.integers(0, VOCAB - 1)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1, 8),
    "max_length": st.integers(2, 16),
    "min_new_tokens": st.integers(0, 6),
    "min_length": st.integers(0, 14),
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([0.3, 1.0, 1, 2.5]),
    "top_k": st.sampled_from([0, 1, 3, 50, 1000]),
    "top_p": st.sampled_from([0.2, 0.8, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    "repetition_penalty": st.sampled_from([0.7, 1.0, 1.6]),
    "eos_token_id": TOKENS | st.lists(TOKENS, min_size=1, max_size=3),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=3),
    "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=4),
    "sequence_bias": st.dictionaries(
        st.lists(TOKENS, min_size=1, max_size=2).map(tuple),
        st.floats(-9, 9).map(lambda value: round(value, 2)),
        min_size=1,
        max_size=3,
    ),
    "num_beams": st.just(1),
    "output_scores": st.just(False),
    "pad_token_id": TOKENS,
}


@st.composite
def configs(draw: st.DrawFn) -> GenerationConfig:
    names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=8))
    return GenerationConfig(**{name: draw(FIELDS[name]) for name in sorted(names)})


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", torch.float32)


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[jackfield.Engine]:
    with jackfield.load(copy.deepcopy(model)) as found:
        yield found


def ours(file: GenerationConfig, own: GenerationConfig | None) -> Settings | str:
    asked = {} if own is None else {"generation_config": own}
    try:
        return resolve(wishes(asked, file), len(PROMPT), LIMITS)
    except (SettingsError, PromptError) as error:
        return str(error)


def prepared(model: Any, file: GenerationConfig, own: GenerationConfig | None) -> GenerationConfig:
    """What `generate` makes of both, up to the processors. Raises what it raises."""
    model.generation_config = file
    config, _ = model._prepare_generation_config(own)
    model._prepare_special_tokens(config, True, device="cpu", batch_size=1)
    every = [c for c in (file, own) if c is not None]
    default = all(c.max_length is None for c in every)
    ids = torch.tensor([PROMPT])
    config = model._prepare_generated_length(
        config, default, all(c.min_length is None for c in every), "input_ids", len(PROMPT), ids
    )
    model._validate_generated_length(config, len(PROMPT), default)
    return config


def has_a_length(file: GenerationConfig, own: GenerationConfig | None) -> bool:
    every = [c for c in (file, own) if c is not None]
    return any(c.max_new_tokens or c.max_length for c in every)


EXAMPLES = settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@EXAMPLES
@given(file=configs(), own=st.none() | configs(), seed=st.integers(0, 99))
def test_both_draw_from_one_distribution(
    model: Any, file: GenerationConfig, own: GenerationConfig | None, seed: int
) -> None:
    assume(has_a_length(file, own))
    found = ours(copy.deepcopy(file), copy.deepcopy(own))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = prepared(model, file, own)
        except ValueError:
            config = None
    if config is None:
        assert isinstance(found, str)
        event("refused by both")
        return
    if isinstance(found, str):  # transformers warns of it, and goes on
        assert "min_new_tokens=" in found
        assert "is more than max_new_tokens=" in found
        event("refused here")
        return
    assert found.max_new_tokens == min(config.max_length - len(PROMPT), 128 - len(PROMPT))
    assert found.do_sample is bool(config.do_sample)
    ids = [*PROMPT, 11, 5]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    processors = model._get_logits_processor(config, len(PROMPT), torch.tensor([PROMPT]))
    expected = processors(torch.tensor([ids]), logits.clone())
    sequence = RunningSequence(0, PROMPT, found)
    sequence.tokens = [*sequence.tokens, *ids[len(PROMPT) :]]
    pipeline = Pipeline.of(RowMap.verifying([sequence]), VOCAB, StepBlock(logits.device))
    scores, _ = pipeline.processed(logits)
    if found.do_sample:
        event("sampled")
        assert pipeline.settled.sampled is not None
        scores = pipeline.settled.sampled.warpers(scores).softmax(-1)
        expected = expected.softmax(-1)
    else:
        event("greedy")
    assert torch.equal(expected > -torch.inf, scores > -torch.inf)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


@settings(EXAMPLES, max_examples=60)
@given(file=configs(), own=st.none() | configs())
def test_greedy_tokens_are_those_of_generate(
    engine: jackfield.Engine, model: Any, file: GenerationConfig, own: GenerationConfig | None
) -> None:
    assume(has_a_length(file, own))
    for config in (file, own):
        if config is not None:
            config.do_sample = None  # and what says how tokens are drawn says nothing
    engine.model.generation_config = model.generation_config = file
    asked = {} if own is None else {"generation_config": own}
    try:
        (found,) = engine.generate(PROMPT, **asked)
    except SettingsError as error:
        said = str(error)
        if "max_length" not in said:
            assume("is more than max_new_tokens=" not in said)  # transformers warns, and goes on
            raise
        with pytest.raises(ValueError, match="max_length"):
            model.generate(torch.tensor([PROMPT]), **asked)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.tensor([PROMPT])  # without a mask it would take pad_token_id for padding
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    assert found.token_ids == expected[0, len(PROMPT) :].tolist()
