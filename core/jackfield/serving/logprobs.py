"""Log-probabilities in the two forms of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jackfield.contracts import TokenLogprob
from jackfield.engine.engine import Engine

LEAST = -9999.0  # what OpenAI says for a probability of 0, which JSON has no logarithm for


def of_chat(engine: Engine, found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``."""
    return [
        {
            **_token(engine, one.token_id, one.logprob),
            "top_logprobs": [_token(engine, token, value) for token, value in one.top],
        }
        for one in found
    ]


def _token(engine: Engine, token: int, logprob: float) -> dict[str, Any]:
    data = engine.token_bytes(token)
    return {
        "token": data.decode(errors="replace"), "logprob": max(logprob, LEAST),
        "bytes": list(data),
    }  # fmt: skip


def of_text(engine: Engine, found: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion, whose tokens begin at the character `offset`."""
    texts = [engine.token_bytes(one.token_id).decode(errors="replace") for one in found]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(one.logprob, LEAST) for one in found],
        "top_logprobs": [
            {
                engine.token_bytes(token).decode(errors="replace"): max(value, LEAST)
                for token, value in one.top
            }
            for one in found
        ],
        "text_offset": offsets,
    }
