"""Models that the loop cannot drive rightly are refused by name, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import GenerationMixin
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from jackfield.bridge.encoders import NEEDED, has_encoder
from jackfield.bridge.features import reads_features
from jackfield.bridge.layer_configs import of_all
from jackfield.bridge.quirks import HAS_ITS_OWN_CACHE, KEEPS_STATE, NUMBERS_COLUMNS
from jackfield.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from jackfield.bridge.probe import Call


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
    taken = inspect.signature(model.forward).parameters
    if has_encoder(model.config):
        lacking = sorted(NEEDED - set(taken) - _made_here(model.config))
        if not _generates_as_others(model):
            return "generates by code of its own, which is not run here; call its own generate"
        return f"takes no {lacking[0]}, which its decoder is called with" if lacking else None
    heads = of_all(text, "num_attention_heads")
    keeps_states = {*layer_types} == {"linear_attention"} and heads is None
    if keeps_states and {"cache_params", "attention_mask"} <= {*taken}:
        return None
    missing = {"past_key_values", "attention_mask"} - set(taken)
    if missing or heads is None:
        what = f"takes no {min(missing)}" if missing else "has no attention heads"
        return (
            f"{what}, so it does not generate with a KV cache; give a transformer decoder that does"
        )
    if attentions and not any(getattr(module, "is_causal", True) for module in attentions):
        return _BOTH_DIRECTIONS
    if HAS_ITS_OWN_CACHE.holds(model):
        return "takes a cache of its own class only; give a model with a cache of transformers'"
    if KEEPS_STATE.holds(model) and "linear_attention" not in layer_types:
        return (
            "keeps what it has read in its modules and not in a cache, so requests would share it; "
            "give a model that keeps it in its cache"
        )
    if not _counts_tokens(model):
        return (
            "has no layer that attends, by which transformers counts what a cache holds; give a "
            "model with one"
        )
    if NUMBERS_COLUMNS.holds(model):
        return (
            "takes no position_ids and numbers tokens by their column, so prompts of different "
            "lengths would be read wrongly together; give a decoder that takes positions"
        )
    return None


def _made_here(config: PreTrainedConfig) -> frozenset[str]:
    """What a model is not called with: the mask of features is handed to the decoder itself."""
    return frozenset({"attention_mask"} if reads_features(config) else ())


def _generates_as_others(model: PreTrainedModel) -> bool:
    """Whether its class has transformers' usual `generate`, or Whisper's, which is known here."""
    own = getattr(type(model), "generate", None)
    return own is GenerationMixin.generate or own is WhisperGenerationMixin.generate


def check_decoder(config: PreTrainedConfig) -> None:
    """Raise CheckpointError for an encoder-decoder model, where only decoders are run."""
    if has_encoder(config):
        raise CheckpointError(f"a model of type {config.model_type!r} {_ENCODER_DECODER}")


def check_generates(model: PreTrainedModel) -> None:
    """Raise CheckpointError for a class without a head that tells the next token."""
    if not type(model).can_generate():
        raise CheckpointError(
            f"{type(model).__name__} of type {model.config.model_type!r} gives no scores of next "
            "tokens, so it generates no text; give the class for it, e.g. by "
            "AutoModelForCausalLM.from_pretrained"
        )


def _counts_tokens(model: PreTrainedModel) -> bool:
    """Whether transformers can tell how many tokens its cache for `model` holds."""
    from transformers import DynamicCache

    try:
        DynamicCache(config=model.config).get_seq_length()
    except ValueError:
        return False
    return True


_ENCODER_DECODER = (
    "is an encoder-decoder model, which runs in an engine (jackfield.load) and in no plain "
    "transformers code; give a decoder"
)
_BOTH_DIRECTIONS = "reads its text in both directions, so it cannot continue it; give a decoder"


def check_calls(model: PreTrainedModel, calls: Sequence[Call]) -> None:
    """The same, for what only shows when the model calls its attention."""
    if any(call.sees(0, 1) for call in calls if not call.crosses):
        raise CheckpointError(
            f"{type(model).__name__} of type {model.config.model_type!r} {_BOTH_DIRECTIONS}"
        )
