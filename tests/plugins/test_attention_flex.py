"""flex_attention: exact in float64 as written, and its compiled kernel within float32's error."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from families import WINDOW, build, config_of, oracle, prompts, references
from hypothesis import given, settings
from hypothesis import strategies as st

import jackfield
from jackfield.errors import PlanError

LENGTHS = (WINDOW - 2, WINDOW + 1, 3 * WINDOW)
COUNT = WINDOW + 3
SERVED = ("llama", "llama-mqa", "llama-wide-heads", "mistral", "qwen2", "gemma2", "gemma3", "phi3",
          "mixtral", "gpt-oss")  # fmt: skip

model_of = functools.cache(build)


@pytest.mark.parametrize("family", SERVED)
def test_ragged_batch_equals_the_oracle(family: str) -> None:
    expected = references(family, LENGTHS, COUNT)
    with jackfield.load(model_of(family), attn_implementation="flex_attention") as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        seen = engine.report()["attention"]
    assert [completion.token_ids for completion in found] == expected
    assert seen.name == "flex_attention"
    assert set(seen.prefill.values()) == {1}
    assert set(seen.decode.values()) == {COUNT - 1}
