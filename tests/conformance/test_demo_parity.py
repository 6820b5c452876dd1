"""Prompts to the demo model in float32: the tokens of transformers, one at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.demo.tasks import TASKS, heldout

COUNT = 16


def demo_prompts() -> list[list[int]]:
    """Questions of every task, as chat messages."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    items = [item for task in TASKS for item in heldout(task, 200 // len(TASKS) + 1, seed=5)]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": item.prompt}], tokenize=False, add_generation_prompt=True
        )
        for item in items
    ]
    return [tokenizer(text)["input_ids"] for text in chats[:200]]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(slice(3, None, 5), id="40"),
        pytest.param(slice(None), id="200", marks=pytest.mark.long),
    ],
)
def test_prompts_in_ragged_batches_equal_transformers(part: slice) -> None:
    prompts = demo_prompts()
    assert len({tuple(p) for p in prompts}) == 200
    prompts = prompts[part]
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False
        )
        expected.append(out[0, len(prompt) :].tolist())
    with jackfield.load("demo", attn_implementation="sdpa", dtype="float32") as engine:
        found = [c.token_ids for c in engine.generate(prompts, max_new_tokens=COUNT)]
    assert found == expected
