"""Checks of attentions in an encoder-decoder model: what both of its halves see."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from jackfield.testing.attention.jobs import capabilities_of, main_dtype
from jackfield.testing.attention.whole import PROMPTS, served
from jackfield.testing.checks import Check, WrongError
from jackfield.testing.engines import engine_with
from jackfield.testing.models import VOCAB
from jackfield.testing.subject import Subject

START = 2
_HEADS = 4


def checks(subject: Subject) -> Iterator[Check]:
    can = capabilities_of(subject)
    if "padded" in can.layouts and "cross_attention" in can.features:
        yield Check(
            "engine.padded.cross_attention", "features: cross_attention, in an engine",
            lambda _: _compared(subject),
        )  # fmt: skip


def _compared(subject: Subject) -> str:
    """Prompts of several lengths in one batch; every logit is computed again, alone."""
    model = _model(subject)
    served(subject, model, "padded")
    with engine_with(subject, copy.deepcopy(model)) as (engine, _):
        found = engine.generate(PROMPTS, max_new_tokens=7, eos_token_id=None, output_logits=True)
    exact, worst = copy.deepcopy(model).double(), 0.0
    for prompt, completion in zip(PROMPTS, found, strict=True):
        right = _logits(exact, prompt, completion.token_ids)
        plain = _logits(model, prompt, completion.token_ids)
        least = 32 * torch.finfo(model.dtype).eps * float(right.std())
        bound = max(4 * float((plain - right).abs().max()), least)
        assert completion.logits is not None  # they were asked for
        off = float((completion.logits.double() - right).abs().max())
        if not off <= bound:
            raise WrongError(
                f"the logits behind a prompt of {len(prompt)} tokens that an encoder read are off "
                f"by {off:.3g} (computed again, alone, in float64; at most {bound:.3g} is rounding)"
            )
        worst = max(worst, off)
    return f"at most {worst:.2g} off"


def config_for(subject: Subject) -> transformers.BartConfig:
    """The config of a model with an encoder, of heads that `subject` has."""
    sizes = capabilities_of(subject).head_dims
    return transformers.BartConfig(
        vocab_size=VOCAB, d_model=_HEADS * (12 if sizes is None else min(sizes)), init_std=0.35,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=_HEADS,
        decoder_attention_heads=_HEADS, encoder_ffn_dim=40, decoder_ffn_dim=40,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=1,
        decoder_start_token_id=START, forced_eos_token_id=None,
    )  # fmt: skip


def _model(subject: Subject) -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(subject.seed)
        model: Any = transformers.BartForConditionalGeneration(config_for(subject))
    model.set_attn_implementation("eager")
    return model.to(getattr(torch, main_dtype(subject))).eval().to(subject.device)


@torch.inference_mode()
def _logits(model: Any, prompt: list[int], new: list[int]) -> torch.Tensor:
    """float64 `[new, vocab]`: what each of `new` was chosen by."""
    texts = torch.tensor([prompt]), torch.tensor([[START, *new[:-1]]])
    ids, begun = (tokens.to(model.device) for tokens in texts)
    logits = model(input_ids=ids, decoder_input_ids=begun, use_cache=False).logits
    return logits[0].double().cpu()  # type: ignore[no-any-return]
