"""Engines whose model says what it is told to, with chat templates that know tools and thoughts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from saying import TOOLS
from tool_templates import HERMES
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.engine.intake import Intake

if TYPE_CHECKING:
    import pytest

ASKED = [{"role": "user", "content": "Is it raining in Bergen?"}]
THINKING = HERMES.replace(
    "{%- if enable_thinking is defined",
    "{{- '<think>' if thinks }}{%- if enable_thinking is defined",
)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def tokenizer_of(template: str, special: tuple[str, ...] = ()) -> Any:
    made = AutoTokenizer.from_pretrained(MODEL_PATH)
    made.chat_template = template
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def model_of(template: str) -> tuple[LlamaForCausalLM, Any]:
    """A tiny model, and its tokenizer."""
    tokenizer = tokenizer_of(template)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval(), tokenizer


def loaded(template: str) -> jackfield.Engine:
    model, tokenizer = model_of(template)
    return jackfield.load(model, tokenizer=tokenizer, decoding="sample")


def forced(tokenizer: Any, text: str) -> dict[str, Any]:
    """Settings that have a model say a text."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    begun: list[int] = []

    def allowed(number: int, tokens: torch.Tensor) -> list[int]:
        begun[:] = begun or [len(tokens)]
        return [ids[len(tokens) - begun[0]]]

    return {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": len(ids),
            "eos_token_id": ids[-1]}  # fmt: skip


def saying(engine: jackfield.Engine, text: str, **more: Any) -> dict[str, Any]:
    """The same where it may call `TOOLS`."""
    return forced(engine.tokenizer, text) | {"tools": TOOLS, **more}


def answering(monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, str]) -> list[Any]:
    """Have every engine answer a chat by the text of its last message; the prompts as they come."""
    prompts: list[Any] = []
    sequences = Intake.sequences

    def answered(
        self: Intake, prompt: Any, asked: Mapping[str, Any], *rest: Any, **how: Any
    ) -> Any:
        said = answers.get(prompt[-1]["content"]) if isinstance(prompt, list) else None
        prompts.append(copy.deepcopy(prompt))
        own = {} if said is None else forced(self._text.tokenizer, said)
        return sequences(self, prompt, {**asked, **own}, *rest, **how)

    monkeypatch.setattr(Intake, "sequences", answered)
    return prompts
