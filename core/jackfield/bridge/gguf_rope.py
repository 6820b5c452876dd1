"""Rotary embeddings of a GGUF file that are stretched: what transformers' mapping leaves out.

llama.cpp stores the divisors that Llama 3.1 stretches its frequencies by as a tensor. Its own
formula has four numbers, which are found again and compared.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jackfield.bridge.gguf_header import GgufHeader
from jackfield.errors import CheckpointError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DIVISORS = "rope_freqs.weight"
_LONG_CONTEXT = ("rope_factors_long.weight", "rope_factors_short.weight")

#: Of Llama 3.1 and after: low_freq_factor, high_freq_factor, original_max_position_embeddings.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192


def rope_of(header: GgufHeader, config: PreTrainedConfig) -> None:
    """Put what the file says of its rotary embeddings into `config`. Raises CheckpointError where
    that cannot be said there.
    """
    rope: Any = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_theta" not in rope:
        rope = rope.get("full_attention")  # of Gemma 3, where layers with windows have their own
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return
    if name := next((n for n in _LONG_CONTEXT if n in header.tensors), None):
        raise _untaken(header, f"has {name}")
    size = _head_dim(config)
    rotated = header.own("rope.dimension_count")
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
    if isinstance(rotated, int) and rotated != int(size * share):
        raise _untaken(header, f"rotates {rotated} of {size} numbers of a head")
    if rope.get("rope_type", "default") != "default":
        return  # transformers has taken it
    rope.update(_scaling(header))
    if DIVISORS in header.tensors:
        rope.update(_llama3(header, float(rope["rope_theta"]), int(size * share)))


def _scaling(header: GgufHeader) -> dict[str, Any]:
    kind, factor = header.own("rope.scaling.type"), header.own("rope.scaling.factor")
    if kind in (None, "none") or not factor or factor == 1:
        if header.own("rope.scale_linear") not in (None, 0, 1):
            return {"rope_type": "linear", "factor": float(header.own("rope.scale_linear"))}
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    original = header.own("rope.scaling.original_context_length")
    odd = [k for k in header.values if ".rope.scaling.yarn_" in k or k.endswith(".attn_factor")]
    if kind != "yarn" or not original or odd:
        by = shown(odd[0] if odd else kind)
        raise _untaken(header, f"stretches its rotary embeddings by {by}")
    return {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(original),
    }


def _llama3(header: GgufHeader, theta: float, size: int) -> dict[str, Any]:
    """The numbers of Llama 3.1's formula that gives the file's divisors."""
    tensor = header.tensors[DIVISORS]
    if tensor.type != "F32" or tensor.shape != (size // 2,):
        raise _untaken(header, f"has {DIVISORS} of {tensor}")
    found = np.fromfile(tensor.path, "<f4", size // 2, offset=tensor.start)
    if (found == 1).all():
        return {}
    waves = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    smooth = np.clip((_ORIGINAL / waves - _LOW) / (_HIGH - _LOW), 0, 1)
    factor = float(found.max())
    if not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise _untaken(header, f"has {DIVISORS} that are not those of Llama 3.1")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _head_dim(config: PreTrainedConfig) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _untaken(header: GgufHeader, what: str) -> CheckpointError:
    return CheckpointError(
        f"{header.path} {what}, which is not read here; give the model's folder or hub id"
    )
