"""Greedy tokens equal transformers' own, exactly, in float64, for many architectures."""

from __future__ import annotations

import functools

import pytest
from families import FAMILIES, WINDOW, build, config_of, prompts, references

import jackfield
from jackfield.bridge.model_layers import attention_modules
from jackfield.errors import PlanError

LENGTHS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
COUNT = 2 * WINDOW + 2
ATTENTIONS = ("eager", "sdpa")

model_of = functools.cache(build)
runs = [(f, a) for f in FAMILIES for a in ATTENTIONS if a not in FAMILIES[f].refused]
refusals = [(f, a) for f in FAMILIES for a in FAMILIES[f].refused]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_text_depends_on_what_was_read(family: str) -> None:
    expected = references(family, LENGTHS, COUNT)
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    assert len({token for tokens in expected for token in tokens}) > 10


@pytest.mark.parametrize(("family", "attention"), runs)
def test_ragged_batch_equals_the_oracle(family: str, attention: str) -> None:
    expected = references(family, LENGTHS, COUNT)
    with jackfield.load(model_of(family), attn_implementation=attention) as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        seen = engine.report()["attention"]
    assert [completion.token_ids for completion in found] == expected
    layers = {layer for layer, _ in attention_modules(model_of(family))}
    assert seen.name == attention
    assert seen.prefill == dict.fromkeys(layers, 1)
    assert seen.decode == dict.fromkeys(layers, COUNT - 1)


@pytest.mark.parametrize(("family", "attention"), runs)
def test_single_prompt_equals_the_oracle(family: str, attention: str) -> None:
    expected = references(family, LENGTHS, COUNT)
    with jackfield.load(model_of(family), attn_implementation=attention) as engine:
        for index in (0, -1):
            (found,) = engine.generate(prompts(LENGTHS)[index], max_new_tokens=COUNT)
            assert found.token_ids == expected[index]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "falcon-alibi", "gpt-oss"])
def test_rows_that_end_early_leave_the_others_right(family: str) -> None:
    expected = references(family, LENGTHS, COUNT)
    counts = [3, COUNT, 1, COUNT - 2, 2]
    with jackfield.load(model_of(family)) as engine:
        found = engine.generate(
            prompts(LENGTHS), settings=[{"max_new_tokens": count} for count in counts]
        )
    assert [c.token_ids for c in found] == [
        tokens[:count] for tokens, count in zip(expected, counts, strict=True)
    ]


@pytest.mark.parametrize(("family", "attention"), refusals)
def test_what_a_backend_lacks_is_refused_by_name_from_the_config(
    family: str, attention: str
) -> None:
    feature = FAMILIES[family].refused[attention]
    with pytest.raises(PlanError) as caught:
        jackfield.plan(config_of(family), attn_implementation=attention)
    message = str(caught.value)
    assert f"{attention} (does not support {feature}" in message
    assert "use 'eager'" in message
    assert "\n" not in message
    assert jackfield.plan(config_of(family))["attention"].registered.name == "eager"


def test_head_counts_and_sizes_are_read_off_the_model() -> None:
    def needs(family: str) -> tuple[int, tuple[int, ...], bool]:
        found = jackfield.plan(config_of(family)).requirements
        return found.num_key_value_heads, found.head_dims, "grouped_query" in found.features

    assert needs("llama") == (2, (8,), True)
    assert needs("llama-mqa") == (1, (8,), True)
    assert needs("llama-wide-heads") == (2, (24,), True)
    assert needs("gpt2") == (4, (8,), False)


def test_windows_are_read_off_the_model() -> None:
    for family, windowed in (("mistral", 2), ("qwen2", 1), ("gemma3", 1), ("llama", 0)):
        found = jackfield.plan(config_of(family)).requirements
        assert found.layer_types.count("sliding_attention") == windowed, family
        assert ("sliding_window" in found.features) == bool(windowed), family
