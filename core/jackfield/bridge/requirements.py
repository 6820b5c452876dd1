"""What a model needs of its backends, read off its config before a weight is loaded.

A config does not say whether its attention has sinks, or is code that cannot be replaced. So the
model is built on torch's meta device, where it has modules and shapes but no memory; the attention
modules themselves are asked, and one step is probed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils

from jackfield.bridge.batch_trial import Asked, decoder_trial, tried
from jackfield.bridge.devices import pick_device
from jackfield.bridge.drivable import (
    check_calls,
    check_drivable,
    check_generates,
)
from jackfield.bridge.encoder_trial import encoder_trial
from jackfield.bridge.encoders import encoder_config, has_encoder
from jackfield.bridge.experts import experts_of, with_experts
from jackfield.bridge.feature_trial import feature_trial
from jackfield.bridge.features import reads_features
from jackfield.bridge.footprint import (
    head_is_tied,
    head_of,
    joined_weights,
    numbers_of_a_token,
    stored_quantization,
    weights_of,
)
from jackfield.bridge.layer_configs import of_all, of_layer
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.model_layers import attention_modules, layer_types, replaceable, windows
from jackfield.bridge.mtp import without_heads
from jackfield.bridge.probe import (
    Call,
    Probe,
    irregular,
    probe,
    seen_features,
    shared_layers,
)
from jackfield.bridge.quirks import (
    COUNTS_ROWS,
    HAS_EXPERTS_OF_NOTHING,
    MULTIPLIES_BY_ITSELF,
    READS_A_PREFIX,
    ROTATES_BY_LENGTH,
    STRETCHES_POSITIONS,
)
from jackfield.bridge.source import ModelSource
from jackfield.bridge.state_layers import states_apart
from jackfield.contracts.requirements import BYTES, DTYPES, Requirements
from jackfield.devices import input_device
from jackfield.errors import CheckpointError, JackfieldError, UsageError, first_line
from jackfield.requests.habits import DTYPES_OF
from jackfield.spelling import AUTO, nearest

_NOTHING = ((0, 0), (0, 0))  # keys and values of a layer without attention


def requirements_of(
    source: ModelSource, *, dtype: str, device: str | torch.device, deterministic: bool = False
) -> Requirements:
    """Derive the requirements of `source`. Raises CheckpointError, PlanError, UsageError."""
    model = source.live if source.live is not None else meta_model(source.config)
    name = dtype_name(dtype, source)
    check_generates(model)
    place = pick_device(device, source)
    try:
        needs = describe(
            model,
            dtype=name,
            device=place,
            batch_invariant=deterministic,
            dtype_named=dtype != AUTO,
        )
    except JackfieldError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the config of {type(model).__name__} says what no model can be: {first_line(error)}"
        ) from error
    needs = with_trial(model, needs)
    return needs if source.live is None else with_experts(source.live, needs)


def with_trial(model: PreTrainedModel, needs: Requirements) -> Requirements:
    """`needs` with what a trial in small shows. Raises CheckpointError where nothing is right."""
    # In float64 our own masks are right; a model's own may not be.
    own = {"own_attention", "own_mask"} & needs.features.keys()
    dtype = torch.float64 if own and needs.dtype == "float64" else torch.float32
    trial = encoder_trial if has_encoder(model.config) else decoder_trial
    trial = feature_trial if reads_features(model.config) else trial
    found = tried(model.config, type(model), dtype, trial)
    if found.failed and dtype == torch.float64:
        raise CheckpointError(
            f"{needs.architecture} does not run in float64 ({found.failed}); load it in another "
            "dtype"
        )
    if found.failed and needs.encoder is not None:
        raise CheckpointError(
            f"{needs.architecture}: {found.batch or found.ragged}, so nobody knows what its rows "
            "say beside others; give another model"
        )
    if found.batch:
        raise CheckpointError(
            f"{needs.architecture}: {found.batch}, so requests would change one another; give "
            "another model"
        )
    return replace(
        needs, ragged=found.ragged, pieces=found.pieces, holes=found.holes, fixed=found.fixed
    )


def described(config: PreTrainedConfig) -> Requirements:
    """What a model of `config` needs, as far as its modules and one pass of them tell."""
    return describe(meta_model(config), dtype="float32", device=torch.device("cpu"))


def describe(
    model: PreTrainedModel,
    *,
    dtype: str,
    device: torch.device | None,
    batch_invariant: bool = False,
    dtype_named: bool = True,
) -> Requirements:
    """The requirements of a model that is there, if only as a meta_model."""
    config = model.config
    live = input_device(model).type != "meta"
    weights = () if live else weights_of(model)
    text = config.get_text_config(decoder=True)
    layers = list(attention_modules(model))
    types = layer_types(config)
    check_drivable(model, text, [module for _, module in layers], types)
    seen = probed(model)
    calls = seen.calls
    check_calls(model, calls)
    heads = _most_heads(text, layers)
    kv_heads = {_heads(text, at) // _groups(module) for at, module in layers} or {heads}
    return Requirements(
        architecture=type(model).__name__,
        dtype=dtype,
        device=None if device is None else device.type,
        device_index=None if device is None else device.index,
        num_attention_heads=heads,
        num_key_value_heads=min(kv_heads),
        head_dims=_all_head_dims(layers, text, calls),
        layer_types=types,
        states_apart=states_apart(model, seen.states),
        state_bytes=_state_bytes(types, seen.states, dtype),
        windows=windows(config),
        shared_layers=shared_layers(calls, len(types)),
        dynamic_only=_dynamic_only(text),
        features=_features(model, text, layers, calls),
        model_declines=_declines(model),
        context_length=_context_length(model, text),
        encoder=f"{type(model).__name__} has an encoder" if has_encoder(config) else None,
        encoder_length=_encoder_length(model),
        no_heads=without_heads(model),
        kv_numbers=seen.cached,
        **(shapes_by_layer(calls, len(types)) if heads else _nothing_but_states(seen)),
        token_numbers=numbers_of_a_token(model),
        weights=weights,
        joined_weights=None if live else joined_weights(model),
        weight_bytes=sum(w.numbers * BYTES[w.dtype or dtype] for w in weights),
        head=head_of(model),
        tied_head=head_is_tied(model),
        stored=stored_quantization(config),
        live=live,
        dtype_named=dtype_named,
        irregular=irregular(calls, windows(config))
        or _unseen_layers(layers, types, calls)
        or _two_attentions(config),
        branches=_branches(model),
        counts_rows="rows are shared out by numbers" if COUNTS_ROWS.holds(model) else None,
        plain_matrices=(
            "its code multiplies with a linear layer's matrix by itself"
            if MULTIPLIES_BY_ITSELF.holds(model)
            else None
        ),
        experts_implementation=experts_of(model, dtype, batch_invariant=batch_invariant),
        batch_invariant=batch_invariant,
    )


def _state_bytes(types: Sequence[str], states: Sequence[tuple[int, int]], dtype: str) -> int | None:
    """What a sequence's states take; what recurs is kept in float32 where `dtype` is smaller."""
    if states:
        recurs = max(BYTES[dtype], BYTES["float32"])
        return sum(BYTES[dtype] * conv + recurs * own for conv, own in states)
    return None if "linear_attention" in types else 0


def shapes_by_layer(calls: Sequence[Call], layers: int) -> dict[str, Any]:
    """What each of so many layers hands its attention; nothing where no call was seen."""
    own = [call for call in calls if not call.crosses]
    numbers = {call.layer: call.kv_numbers for call in own}
    shapes = {call.layer: call.kv_shapes for call in own}
    return {
        "packed_numbers": tuple(numbers.get(layer, 0) for layer in range(layers) if numbers),
        "packed_shapes": tuple(shapes.get(layer, _NOTHING) for layer in range(layers) if shapes),
    }


def _nothing_but_states(seen: Probe) -> dict[str, Any]:
    """The same of a model that attends nowhere; nothing where its step was not seen."""
    return {"packed_numbers": seen.cached, "packed_shapes": tuple(_NOTHING for _ in seen.cached)}


def probed(model: PreTrainedModel) -> Probe:
    """How a step of models like this one calls its attention; nothing where none can be made."""
    return _probed(Asked.of(model.config), type(model))  # type: ignore[arg-type]  # is hashable


@functools.lru_cache(maxsize=256)
def _probed(asked: Asked, cls: type[PreTrainedModel]) -> Probe:
    try:
        return probe(meta_model(asked.config, cls))
    except JackfieldError:
        return Probe()


def _branches(model: PreTrainedModel) -> str | None:
    """What of a step its numbers decide, in Python."""
    if ROTATES_BY_LENGTH.holds(model):
        return "the rotary embedding follows the longest text (rope_type = dynamic)"
    if HAS_EXPERTS_OF_NOTHING.holds(model):
        return "some experts compute nothing (zero_expert_num)"
    return None


def _context_length(model: PreTrainedModel, text: PreTrainedConfig) -> int | None:
    """Tokens that a sequence may have; None without a limit."""
    limit = getattr(text, "max_decoder_position_embeddings", None)  # LED has two
    limit = getattr(text, "max_position_embeddings", None) if limit is None else limit
    if limit is None and has_encoder(model.config):  # Whisper, Speech2Text, SpeechT5
        limits = (getattr(text, f"max_{of}_positions", None) for of in ("target", "text"))
        limit = next((found for found in limits if isinstance(found, int)), None)
    if STRETCHES_POSITIONS.holds(model):
        limit = text.rope_parameters.get("original_max_position_embeddings") or limit
    return limit if limit is not None and limit > 0 else None


def _dynamic_only(text: PreTrainedConfig) -> tuple[str, ...]:
    """Layer types with a cache of their own (compressed keys) that has no static form."""
    known = getattr(cache_utils, "STATIC_LAYER_TYPE_MAPPING", None)
    declared = set(getattr(text, "layer_types", None) or ())
    return () if known is None else tuple(sorted(declared - set(known)))


def _unseen_layers(
    layers: list[tuple[int, nn.Module]], types: Sequence[str], calls: Sequence[Call]
) -> str | None:
    """What `irregular` says of layers for which nothing is cached, where no probe saw any call."""
    numbers = {at for at, _ in layers}
    if calls or max(numbers, default=0) < len(types):
        return None
    return f"{len(numbers)} attention layers share the keys and values of {len(types)}"


def _two_attentions(config: PreTrainedConfig) -> str | None:
    """What `irregular` says of a decoder that no probe could see at work."""
    return "a layer looks at its own tokens and at an encoder's" if has_encoder(config) else None


def _encoder_length(model: PreTrainedModel) -> int | None:
    """Tokens that an encoder reads at most; None without one, without a limit, and of features."""
    if not has_encoder(model.config) or reads_features(model.config):
        return None
    config = encoder_config(model)
    text = config.get_text_config()
    names = ("max_encoder_position_embeddings", "max_position_embeddings")
    limits = [getattr(part, name, None) for part in (config, text) for name in names]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _all_head_dims(
    layers: list[tuple[int, nn.Module]], text: PreTrainedConfig, calls: Sequence[Call]
) -> tuple[int, ...]:
    """The sizes of heads that there are, ascending."""
    if calls and any(call.crosses for call in calls):  # T5's config has them by another name
        return tuple(sorted({size for call in calls for _, size in call.kv_shapes}))
    return tuple(sorted({size for _, module in layers for size in _head_dims(module, text)}))


def _head_dims(module: nn.Module, text: PreTrainedConfig) -> set[int]:
    """The sizes of a module's query/key and value heads (two only where they differ, as in MLA)."""
    own = (getattr(module, name, None) for name in ("qk_head_dim", "v_head_dim"))
    return {size for size in own if size is not None} or {
        getattr(module, "head_dim", None)
        or of_all(text, "hidden_size") // of_all(text, "num_attention_heads")
    }


def _heads(text: PreTrainedConfig, layer: int) -> int:
    """The query heads of a layer; 0 where none attends."""
    return int(of_layer(text, layer, "num_attention_heads") or 0)


def _most_heads(text: PreTrainedConfig, layers: list[tuple[int, nn.Module]]) -> int:
    plain = int(of_all(text, "num_attention_heads", 0))
    return max((_heads(text, at) for at, _ in layers), default=plain)


def _groups(module: nn.Module) -> int:
    """The query heads that share keys and values."""
    return int(getattr(module, "num_key_value_groups", 1))


def _features(
    model: PreTrainedModel,
    text: PreTrainedConfig,
    layers: list[tuple[int, nn.Module]],
    calls: Sequence[Call],
) -> dict[str, str]:
    """feature -> evidence, for everything beyond plain causal attention."""
    name = type(model).__name__
    found: dict[str, str] = {}
    heads = _most_heads(text, layers)
    groups = max((_groups(module) for _, module in layers), default=1)
    if groups > 1:
        found["grouped_query"] = f"{heads} query heads on {heads // groups} key/value heads"
    if any(len(_head_dims(m, text)) > 1 for _, m in layers):
        found["mixed_head_sizes"] = "query/key and value heads differ in size"
    types = layer_types(text)
    if "sliding_attention" in types:
        found["sliding_window"] = f"sliding_window = {of_all(text, 'sliding_window')}"
    if "chunked_attention" in types:
        found["chunked"] = f"attention_chunk_size = {of_all(text, 'attention_chunk_size')}"
    if (cap := getattr(text, "attn_logit_softcapping", None)) is not None:
        found["softcap"] = f"attn_logit_softcapping = {cap}"
    if any("sink" in name for _, m in layers for name, _ in m.named_parameters(recurse=False)):
        found["sinks"] = "every head has a sink logit"
    if getattr(text, "alibi", False):
        found["position_bias"] = "alibi = True"
    if has_encoder(model.config):
        found["cross_attention"] = f"{name} has an encoder"
        if "sdpa" in _declines(model):  # NLLB-MoE reads off the mask which tokens are padding
            found["own_mask"] = f"{name} declares that it must not run with sdpa, or its masks"
    if any(getattr(module, "has_relative_attention_bias", False) for _, module in layers):
        found["position_bias"] = f"{name} adds to scores what a distance says"
    if READS_A_PREFIX.holds(model):
        found["bidirectional_prefix"] = "prefix_lm = True"
    for feature, evidence in seen_features(name, calls).items():
        found.setdefault(feature, evidence)
    if not replaceable(model):
        found["own_attention"] = (
            f"{name} does not use transformers' AttentionInterface alone"
            if type(model)._can_set_attn_implementation()
            else f"{name} does not use transformers' AttentionInterface"
        )
    return found


def _declines(model: PreTrainedModel) -> frozenset[str]:
    families = {
        "sdpa": "_supports_sdpa",
        "flash": "_supports_flash_attn",
        "flex": "_supports_flex_attn",
    }
    return frozenset(name for name, flag in families.items() if not getattr(model, flag, False))


def dtype_name(dtype: Any, source: ModelSource) -> str:
    """ "auto" is the dtype of a live model, then the one in the config, then float32."""
    if dtype == AUTO:
        dtype = source.live.dtype if source.live is not None else source.config.dtype or "float32"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        ours = DTYPES_OF.get(name.lower())
        near = f"; write {ours!r}" if ours else nearest(name, DTYPES)
        raise UsageError(f"dtype must be 'auto' or one of {', '.join(DTYPES)}, not {name!r}{near}")
    return name
