"""Run by a test in a process of its own: prints the KiB that a prompt takes at its peak.

`python measure_prefill.py ATTENTION CACHE TOKENS`. More than was held after a prompt of 16 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

import jackfield


def status(field: str) -> int:
    """A field of this process's status in KiB.

    Not `getrusage`: its maximum begins with that of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise KeyError(field)


def main(attention: str, cache: str, tokens: int) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,  # small, so that anything quadratic in the prompt stands out
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    # In one step, as in the padded layout: chunks after the first need masks.
    bound = {"max_batch_tokens": 8192} if cache.startswith("paged") else {}
    with jackfield.load(
        model, attn_implementation=attention, cache_implementation=cache, **bound
    ) as engine:
        engine.generate(list(range(16)), max_new_tokens=2)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = status("VmRSS")
        engine.generate([i % 60 for i in range(tokens)], max_new_tokens=2)
        print(status("VmHWM") - before)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
