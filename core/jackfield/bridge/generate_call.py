"""What `generate` of transformers was called with, as far as a decoding of ours has to know it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from jackfield.errors import UsageError, quoted
from jackfield.requests.vocabulary import CODE, DRAFTING, asks_for_nothing

#: Fields that `generate` itself makes use of: of most of them processors and criteria. Every other
#: field is refused, also one that a later version of transformers adds.
HONOURED = frozenset(
    {
        "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id",
        "disable_compile", "do_sample", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
        "guidance_scale", "max_length", "max_new_tokens", "max_time", "min_length",
        "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_return_sequences", "pad_token_id",
        "remove_invalid_values", "renormalize_logits", "repetition_penalty", "sequence_bias",
        "stop_strings", "suppress_tokens", "temperature", "token_healing", "top_h", "top_k",
        "top_p", "transformers_version", "typical_p", "watermarking_config",
    }
)  # fmt: skip

#: What `generate` hands on for the model's forward, and the loop makes by itself.
_MADE_HERE = frozenset(
    {
        "attention_mask", "cache_params", "cache_position", "logits_to_keep", "past_key_values",
        "position_ids", "use_cache",
    }
)  # fmt: skip

#: Processors that know which row they look at, what all rows began with, or what came before.
_BY_ROW = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def arguments(input_ids: torch.Tensor) -> Mapping[str, Any]:
    """The arguments of the `generate` that decodes `input_ids`; none where nobody called it.

    It hands its streamer and its assistant model to no function of a caller's, and would drop them
    without a word, so they are looked for where they are: among its own variables.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("input_ids") is input_ids:
            return {**frame.f_locals.get("kwargs", {}), **frame.f_locals}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def refuse_lost(
    model: PreTrainedModel,
    config: GenerationConfig,
    given: Mapping[str, Any],
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raise UsageError, by name, for all that a decoding of ours would lose."""
    for what in (
        *_fields(model.generation_config, config),
        *_given(given),
        *_for_the_model(model_kwargs),
    ):
        raise UsageError(
            f"custom_generate=jackfield.decoding(…) does not take {what}; drop it, or use "
            "jackfield.load"
        )


def _fields(own: GenerationConfig | None, config: GenerationConfig) -> Iterator[str]:
    stray = []
    for name, value in vars(config).items():
        if name.startswith("_") or value is None or name in HONOURED:
            continue
        of_the_model = name in (*CODE, *DRAFTING) and value == getattr(own, name, None)
        # What a model's own config says of how things run is told in the log, and ignored.
        if not (of_the_model or asks_for_nothing(name, value)):
            stray.append(f"{name}={quoted(value)}")
    if stray:
        yield ", ".join(stray)


def _given(given: Mapping[str, Any]) -> Iterator[str]:
    if given.get("assistant_model") is not None:
        yield (
            "assistant_model of generate (give it to jackfield.decoding('assisted', "
            "assistant_model=…))"
        )
    if given.get("synced_gpus"):
        yield "synced_gpus=True"
    past = given.get("past_key_values")
    if past is not None:
        yield "past_key_values (cache_implementation of jackfield.decoding chooses a cache)"
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None and not _usual(positions, mask):
        yield "position_ids other than those of the tokens in their rows"


def _usual(positions: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether position_ids are what `generate` makes of the mask."""
    if positions.dim() != 2:
        return False
    if mask is None:
        return bool((positions == torch.arange(positions.shape[1], device=positions.device)).all())
    return bool(((positions == mask.long().cumsum(-1) - 1) | (mask == 0)).all())


def _for_the_model(model_kwargs: Mapping[str, Any]) -> Iterator[str]:
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        yield "past_key_values that hold tokens"
    for name, value in model_kwargs.items():
        if name not in _MADE_HERE and value is not None:
            yield f"{name} for the model's forward"


def check_processors(processors: Any, rows: int, *, packed: bool) -> None:
    """Refuse processors that look at all rows together; each row is processed by itself."""
    for processor in processors:
        name = type(processor).__name__
        if isinstance(processor, _BY_ROW) and rows > 1:
            raise UsageError(
                f"custom_generate=jackfield.decoding(…) takes {name} for one prompt at a time; "
                "generate the prompts one by one"
            )
        if packed and isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise UsageError(
                "guidance_scale runs the model a second time beside the loop, with a cache of "
                "transformers', which the packed layout cannot serve; give jackfield.decoding(…, "
                "cache_implementation='dynamic')"
            )
