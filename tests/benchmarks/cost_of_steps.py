"""What a step takes beside the model's forward call: `python` runs it and prints.

The forward call of a small model is replaced by one that hands out logits, always the same; what is
told is the thread's processor time from its end to the next one's beginning: sampling, the cache's
pages, schedule, texts and readers, everything. Medians and lower quartiles of the steps in which
all requests decode, in microseconds, with one thread. Arguments choose rows of the table by name.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import jackfield

VOCABULARY = 152_000
PROMPT = 32
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "temperature": [{"temperature": 0.8}],
    "top-k": [{"top_k": 50}],
    "top-p": [{"top_p": 0.95}],
    "min-p": [{"min_p": 0.05}],
    "repetition": [{"repetition_penalty": 1.1}],
    "presence": [{"presence_penalty": 0.5, "frequency_penalty": 0.5}],
    "all": [{"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}],
    "one top-k": [{"top_k": 50}, *[{}] * 7],
    "one top-p": [{"top_p": 0.95}, *[{}] * 7],
}


def small_model(vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-any-return]


def peaked(rows: int, vocab_size: int) -> torch.Tensor:
    """Logits like a language model's: half of the probability in few tokens, and a long tail."""
    chance = torch.Generator().manual_seed(1)
    ranks = torch.stack([torch.randperm(vocab_size, generator=chance) for _ in range(rows)])
    noise = torch.randn(rows, vocab_size, generator=chance)
    return (12 - 1.8 * (1 + ranks).log() + 0.3 * noise)[:, None]


def steps(vocab_size: int, rows: int, count: int, settings: list[dict[str, Any]]) -> list[float]:
    """The microseconds beside the forward call, of each step in which all decode."""
    logits, times, ended = peaked(rows, vocab_size), [], 0

    def forward(inputs: Any) -> torch.Tensor:
        nonlocal ended
        if ended:
            times.append((time.thread_time_ns() - ended) / 1000)
        found = logits[: inputs.rows]
        ended = time.thread_time_ns()
        return found

    asked = [{"max_new_tokens": count, **settings[row % len(settings)]} for row in range(rows)]
    with jackfield.load(small_model(vocab_size), max_batch_size=rows) as engine:
        engine._loop.forward = forward
        engine.generate(
            [[5 + (7 * row + at) % 900 for at in range(PROMPT)] for row in range(rows)],
            settings=asked,
        )
    return times[10:-2]


def main() -> None:
    torch.set_num_threads(1)
    table = [("512 rows", 1000, 512, 120, [{}]), ("8 rows", 1000, 8, 300, [{}])]
    table += [
        (name, VOCABULARY, rows, 300 if name == "greedy" else 40, settings)
        for name, settings in SETTINGS.items()
        for rows in ((1, 8) if len(settings) == 1 else (8,))
    ]
    for name, vocab_size, rows, count, settings in table:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        found = steps(vocab_size, rows, count, settings)
        low, middle, _ = statistics.quantiles(found, n=4)
        sys.stdout.write(
            f"{name:12} vocabulary {vocab_size:6} rows {rows:3}: {middle:8.0f} us a step, lower "
            f"quartile {low:8.0f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
