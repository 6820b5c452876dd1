"""Models that the loop cannot drive rightly are refused by name, before anything runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jackfield.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from jackfield.bridge.rehearsal import Call

#: What transformers itself gets wrong for the shorter rows of a padded batch, by model type.
_NOT_IN_BATCHES = {
    "git": "widens the padding mask of a step by image tokens, which a text does not have",
    "minimax_m3_vl_text": "counts its blocks of keys from the first column, padding included",
}
#: Model types that mask with float64's lowest number and then take a softmax in float32, where it
#: is minus infinity: the rows of padding are not numbers, and spread.
_NOT_IN_FLOAT64 = frozenset({"axk2", "dbrx", "deepseek_v32", "doge", "glm_moe_dsa", "mpt", "xglm"})
_NUMBERED = re.compile(r"Position(al)?Embedding")


def check_drivable(
    model: PreTrainedModel,
    text: PreTrainedConfig,
    attentions: Sequence[nn.Module],
    layer_types: Sequence[str],
) -> None:
    """Raise CheckpointError for a model that would go on wrongly, or without what it has read."""
    if reason := _undrivable(model, text, attentions, layer_types):
        raise CheckpointError(
            f"{type(model).__name__} of type {model.config.model_type!r} {reason}"
        )


def _undrivable(
    model: PreTrainedModel,
    text: PreTrainedConfig,
    attentions: Sequence[nn.Module],
    layer_types: Sequence[str],
) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):
        return _ENCODER_DECODER
    taken = inspect.signature(model.forward).parameters
    missing = {"past_key_values", "attention_mask"} - set(taken)
    if missing or not hasattr(text, "num_attention_heads"):
        what = f"takes no {min(missing)}" if missing else "has no attention heads"
        return (
            f"{what}, so it does not generate with a KV cache; give a transformer decoder that does"
        )
    if attentions and not any(getattr(module, "is_causal", True) for module in attentions):
        return _BOTH_DIRECTIONS
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return "takes a cache of its own class only; give a model with a cache of transformers'"
    named = "linear_attention" in layer_types or getattr(text, "layer_types", None)
    if getattr(model, "_is_stateful", False) and not named:
        return (
            "keeps what it has read in its modules and not in a cache, so requests would share it; "
            "give a model that keeps it in its cache"
        )
    if "position_ids" not in taken and _numbers_columns(model, text):
        return (
            "takes no position_ids and numbers tokens by their column, so prompts of different "
            "lengths would be read wrongly together; give a decoder that takes positions"
        )
    if reason := _NOT_IN_BATCHES.get(text.model_type):
        return (
            f"{reason}, so prompts of different lengths would be read wrongly together; give "
            "another model"
        )
    return None


def check_decoder(config: PreTrainedConfig) -> None:
    """Raise CheckpointError for an encoder-decoder model, whose decoder alone is another model."""
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"a model of type {config.model_type!r} {_ENCODER_DECODER}")


def check_generates(model: PreTrainedModel) -> None:
    """Raise CheckpointError for a class without a head that tells the next token."""
    if not type(model).can_generate():
        raise CheckpointError(
            f"{type(model).__name__} of type {model.config.model_type!r} gives no scores of next "
            "tokens, so it generates no text; give the class for it, e.g. by "
            "AutoModelForCausalLM.from_pretrained"
        )


def check_dtype(model: PreTrainedModel, text: PreTrainedConfig, dtype: str) -> None:
    """Raise CheckpointError where a model computes in float32 what it is given in float64."""
    if dtype == "float64" and text.model_type in _NOT_IN_FLOAT64:
        raise CheckpointError(
            f"{type(model).__name__} of type {text.model_type!r} masks in {dtype} what it then "
            "computes in float32, so padding would become NaN; load it in another dtype"
        )


_ENCODER_DECODER = "is an encoder-decoder model, and jackfield runs decoders only; give a decoder"
_BOTH_DIRECTIONS = "reads its text in both directions, so it cannot continue it; give a decoder"


def _numbers_columns(model: PreTrainedModel, text: PreTrainedConfig) -> bool:
    """Whether positions are embedded as such; rotated or as a bias, only distances count."""
    if getattr(text, "rotary_value", None) is not None:  # RoFormer, whose table is rotated in
        return False
    return any(_NUMBERED.search(type(module).__name__) for module in model.modules())


def check_calls(model: PreTrainedModel, calls: Sequence[Call]) -> None:
    """The same, for what only shows when the model calls its attention."""
    if any(call.sees(0, 1) for call in calls):
        raise CheckpointError(
            f"{type(model).__name__} of type {model.config.model_type!r} {_BOTH_DIRECTIONS}"
        )
