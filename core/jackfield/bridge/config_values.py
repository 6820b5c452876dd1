"""What the numbers of a config may be, checked before anything is built of them.

A model of a billion layers is never built, and a window of no token sees nothing: either would
only show as a process that hangs, or as text that means nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jackfield.errors import CheckpointError, quoted

_MANY = 100_000
_WIDE = 1 << 22
_LARGE = 1 << 40

#: field -> the least and the most that it can be; None and lists (one number a layer) are as well.
_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), (1, 10_000)
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), (1, _MANY)
    ),
    "num_key_value_heads": (1, _MANY),
    "vocab_size": (1, 1 << 30),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), (1, _WIDE)),
    "intermediate_size": (0, _WIDE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (-1, _LARGE)),
    # Of a window of one token transformers' cache keeps `keys[-0:]`, which is all of them.
    "sliding_window": (2, _LARGE),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "keep_window_size"), (1, _LARGE)),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, _MANY)
    ),
}
#: Fields that say how many there are of something, by their names.
_COUNT = re.compile(r"^(num|n)_|_(layers|heads|experts|groups|blocks)$")
#: Fields that say how wide something is.
_WIDTH = re.compile(r"_(dim|size|rank)$")
_POSITIVE = frozenset({"rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"})
#: What is not about the shape of a model.
_APART = frozenset({"quantization_config", "generation_config", "task_specific_params"})


def check_values(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a number that no model can have. `where` names the config."""
    for name, value, problem in _problems(config):
        asked = f"{name}={quoted(value)}"
        raise CheckpointError(f"{where} has {asked}, which no model can have: {problem}; mend it")


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name, value in config.items():
        if name in _BOUNDS:
            for one in value if isinstance(value, list | tuple) else [value]:
                if one is not None and (problem := _out_of(one, *_BOUNDS[name])):
                    yield name, value, problem
        elif name in ("dtype", "torch_dtype"):
            if not _is_dtype(value):
                yield name, value, "it must name a dtype of torch, such as float32"
        elif name == "return_dict" and not value:
            yield name, value, "it must be true, for parts of a model read what others return"
        elif isinstance(value, Mapping) and name not in _APART:
            yield from _problems(value)
        elif type(value) is int and value > _most(str(name)):
            yield name, value, "it is too large"
        elif type(value) is float and math.isnan(value):
            yield name, value, "it is no number"
        elif name in _POSITIVE and type(value) in (int, float) and not 0 < value < math.inf:
            yield name, value, "it must be above 0"
    yield from _misfits(config)


def _most(name: str) -> int:
    """The most that a field can be of which nothing but its name is known."""
    if _COUNT.search(name):
        return _MANY
    return _WIDE if _WIDTH.search(name) else 1 << 62


def _out_of(value: Any, least: int, most: int) -> str | None:
    if type(value) is not int:
        return f"it must be a whole number, not {type(value).__name__}"
    return None if least <= value <= most else f"it must be from {least} to {most}"


def _is_dtype(value: Any) -> bool:
    """None, a name, or a name for each part of a model."""
    if isinstance(value, Mapping):
        return bool(value) and all(_is_dtype(one) for one in value.values())
    name = str(value).removeprefix("torch.") if isinstance(value, str | torch.dtype) else ""
    return value is None or isinstance(getattr(torch, name, None), torch.dtype)


def _misfits(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Heads that cannot share keys and values, or the width of a layer."""
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is not int or heads < 1:
        return
    if type(groups) is int and groups > 0 and heads % groups:
        yield "num_key_value_heads", groups, f"it must divide num_attention_heads={heads}"
