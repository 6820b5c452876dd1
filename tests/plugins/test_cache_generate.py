"""``jackfield.cache`` hands plain transformers code the cache that a name stands for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from families import build, prompts

import jackfield
from jackfield.errors import OptionError, PlanError, SelectionError, UsageError

COUNT = 12
PROMPT = torch.tensor(prompts((9,)))
FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "gemma3", "gpt-oss")

model_of = functools.cache(build)


def text(family: str, **arguments: Any) -> list[int]:
    found = model_of(family).generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=COUNT,
        do_sample=False,
        **arguments,
    )
    return found[0].tolist()


@pytest.mark.parametrize(
    ("selection", "built_in", "cls"),
    [
        ("plugin:dynamic", "dynamic", transformers.DynamicCache),
        ("jackfield/dynamic", "dynamic", transformers.DynamicCache),
        ("plugin:static?max_cache_len=32", "static", transformers.StaticCache),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_says_the_same(family: str, selection: str, built_in: str, cls: type) -> None:
    cache = jackfield.cache(selection, model_of(family))
    assert type(cache) is cls
    assert text(family, past_key_values=cache) == text(family, cache_implementation=built_in)
    assert int(cache.get_seq_length()) == PROMPT.shape[1] + COUNT - 1


@pytest.mark.parametrize(
    ("selection", "error", "says"),
    [
        ("plugin:paged", UsageError, "its packed layout needs an attention of jackfield's own"),
        ("plugin:static", UsageError, r"write 'static\?max_cache_len=…'"),
        ("plugin:offloaded", PlanError, "there is no second device"),
        ("plugin:quantized?backend=fp8", PlanError, "does not hold dtype float64"),
        ("plugin:statik", SelectionError, "did you mean 'static'"),
        ("plugin:static?max_cache_len=x", OptionError, "of type int"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(
    selection: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        jackfield.cache(selection, model_of("llama"))


def test_it_is_made_for_a_model() -> None:
    with pytest.raises(UsageError, match="made for a transformers model"):
        jackfield.cache("dynamic", "demo")  # type: ignore[arg-type]
