"""Engines that draft, with draft models that are right about half of the time."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from families import FAMILIES, VOCAB, build, config_of

import jackfield

model_of = functools.cache(build)

LOOKUP = "prompt_lookup?min_acceptance_rate=0&max_matching_ngram_size=1"
ASSISTED = "assisted?min_acceptance_rate=0&assistant_confidence_threshold=0"
STRATEGIES = (LOOKUP, ASSISTED)


@functools.cache
def draft_of(family: str, noise: float = 0.02) -> transformers.PreTrainedModel:
    """The family's model with its weights shaken, so that it often agrees and often does not."""
    model = build(family)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            shake = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += noise * parameter.std() * shake if parameter.numel() > 1 else 0
    return model


def small_draft(context: int = 128, vocab: int = VOCAB) -> transformers.PreTrainedModel:
    """An unrelated model, for what it can or cannot read."""
    config = config_of("llama")
    config.max_position_embeddings, config.vocab_size = context, vocab
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.generation_config.pad_token_id = 0
    return model.double().eval()


def load(family: str, strategy: str, **arguments: Any) -> jackfield.Engine:
    """The family's model with a strategy, and its shaken copy where that needs one."""
    if strategy.startswith("assisted"):
        arguments = {"assistant_model": draft_of(family), **arguments}
    return jackfield.load(model_of(family), decoding=strategy, **arguments)


def repetitive(count: int, length: int) -> list[list[int]]:
    """Prompts that repeat themselves, so that there is something to look up."""
    generator = torch.Generator().manual_seed(2)
    texts = []
    for n in range(count):
        phrase = torch.randint(2, VOCAB, (3 + n % 3,), generator=generator).tolist()
        texts.append((phrase * length)[: length + n])
    return texts


__all__ = ["ASSISTED", "FAMILIES", "LOOKUP", "STRATEGIES", "draft_of", "load", "model_of",
           "repetitive", "small_draft"]  # fmt: skip
