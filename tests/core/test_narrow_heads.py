"""A head that is narrower than the embedding: no request fails for another one's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from families import build
from torch import nn

import jackfield
from jackfield.errors import JackfieldError

WIDTH = 91
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"sequence_bias": {(110,): 1.0}},
    {"bad_words_ids": [[110]]},
    {"suppress_tokens": [110]},
    {"eos_token_id": 110, "min_new_tokens": 3},
    {"logprobs": WIDTH + 1},
    {"top_k": WIDTH + 1},
]


@pytest.mark.parametrize("prompt", [[5, 6], [5, 110, 6]], ids=["known", "beyond"])
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: next(iter(asked)))
def test_a_victim_goes_on(asked: dict[str, Any], prompt: list[int]) -> None:
    model = build("llama").__class__(build("llama").config).double().eval()
    model.lm_head = nn.Linear(32, WIDTH, bias=False).double()
    with jackfield.load(model) as engine:
        (alone,) = engine.generate([5, 6, 7, 8], max_new_tokens=12)
        victim = engine.submit([5, 6, 7, 8], max_new_tokens=12)
        try:
            engine.submit(prompt, max_new_tokens=5, **asked).result()
        except JackfieldError as error:
            assert "model failed" not in str(error)  # noqa: PT017 - either is right
        assert victim.result().token_ids == alone.token_ids
