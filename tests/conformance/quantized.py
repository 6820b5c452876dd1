"""What tests of quantizers share: the demo model through plain transformers code, as the oracle."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTQConfig

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.demo.tasks import TASKS, heldout

COUNT = 12


@functools.cache
def demo_prompts() -> list[list[int]]:
    """One question of every task, as chat messages: 15 to 120 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    chats = [[{"role": "user", "content": heldout(task, 1, seed=9)[0].prompt}] for task in TASKS]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


def tokens_of(engine: jackfield.Engine) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(demo_prompts(), max_new_tokens=COUNT)]


class Expected:
    """The tokens of one prompt, and by how much each score exceeded the next best."""

    def __init__(self, tokens: list[int], margins: list[float], spread: float) -> None:
        self.tokens = tokens
        self.margins = margins
        self.bound = spread / 50


@functools.cache
def oracle(selection: str, dtype: str, folder: str = str(MODEL_PATH)) -> list[Expected]:
    """`generate` of the same quantized model, eager, dynamic cache, one prompt at a time."""
    own = folder != str(MODEL_PATH)
    config = jackfield.quantization(f"plugin:{selection}")
    if own:  # the kernel that runs here: that of the saved config repacks weights
        config = GPTQConfig(bits=4, backend="gptq_torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
        )
    if own:
        for module in model.modules():
            vars(module).pop("dequantize_weight", None)  # not compiled, which takes a minute
    return [said(model, prompt) for prompt in demo_prompts()]


def said(model: torch.nn.Module, prompt: list[int]) -> Expected:
    ids = torch.tensor([prompt])
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COUNT,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [step[0].float().topk(2).values for step in done.logits]
    spread = max(float(step[0].float().std()) for step in done.logits)
    margins = [float(first - second) for first, second in best]
    return Expected(done.sequences[0, len(prompt) :].tolist(), margins, spread)


def follows(found: Sequence[list[int]], expected: Sequence[Expected]) -> list[str]:
    """Where tokens differ though the oracle was sure: the scores were not a rounding apart.

    The bound is a fiftieth of the standard deviation of the scores, which is what rounding
    activations anew to 8 bits, or to bfloat16, moves them by; the demo model is sure by far more.
    """
    wrong = []
    for number, (tokens, right) in enumerate(zip(found, expected, strict=True)):
        if tokens == right.tokens:
            continue
        pairs = enumerate(zip(tokens, right.tokens, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(right.tokens)) - 1)
        if right.margins[place] > right.bound:
            wrong.append(f"prompt {number}, token {place}, margin {right.margins[place]:.3f}")
    return wrong
