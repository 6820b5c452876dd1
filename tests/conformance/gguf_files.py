"""GGUF files of small models, written as llama.cpp's converters write them.

Blocks of K-quants, which the package does not make, are random bytes under scales of a given size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

#: transformers' model_type -> llama.cpp's architecture.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "gpt2": "gpt2", "qwen3_moe": "qwen3moe",
}  # fmt: skip

#: Where the float16 numbers of a block are: byte -> their size, as a share of the weights'.
_SCALES: dict[Type, dict[int, float]] = {
    Type.Q4_0: {0: 1 / 5},
    Type.Q4_1: {0: 1 / 5, 2: -1.5},
    Type.Q5_0: {0: 1 / 9},
    Type.Q5_1: {0: 1 / 9, 2: -1.7},
    Type.Q8_0: {0: 1 / 74},
    Type.Q4_K: {0: 1 / 150, 2: 1 / 20},
    Type.Q5_K: {0: 1 / 310, 2: 1 / 20},
    Type.Q6_K: {208: 1 / 1200},
}

#: Each type has a kernel of its own, which takes seconds to compile: an ordinary run has these, one
#: with an offset, with minima, with more bits than four, and of whole bytes.
OFTEN = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")


def sometimes(names: Iterable[str]) -> list[Any]:
    """`names` as parameters; types of blocks that are not among `OFTEN` are for long runs."""
    rare = {kind.name for kind in _SCALES} - set(OFTEN)
    return [pytest.param(n, marks=pytest.mark.long) if n in rare else n for n in names]


def random_blocks(
    kind: Type, rows: int, columns: int, size: float = 1.0, seed: int = 0, byte: int | None = None
) -> Any:
    """uint8 `[rows, bytes]` of blocks of all kinds of bits, whose weights are of about `size`.

    `byte`: every one, but for those of scales.
    """
    numbers, width = GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(seed)
    blocks = drawn.integers(0, 256, (rows, columns // numbers, width), dtype=np.uint8)
    if byte is not None:
        blocks[...] = byte
    for place, share in _SCALES[kind].items():
        scale = share * size * drawn.uniform(0.5, 1.5, blocks.shape[:2])
        blocks[..., place : place + 2] = scale.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def weights(blocks: Any, kind: Type) -> torch.Tensor:
    """What blocks stand for, by the package's own functions: float32 `[rows, columns]`."""
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def stored(values: Any, kind: Type, seed: int = 0) -> Any:
    """`values` in blocks of `kind`; of K-quants other values of that size."""
    if kind.name.endswith("_K"):
        return random_blocks(kind, *values.shape, float(values.std()), seed)
    return gguf.quants.quantize(values, kind)


def export(
    model: Any,
    path: Path,
    kind: Type | Callable[[str], Type] = Type.F32,
    tokenizer: Any = None,
    tensors: dict[str, Any] | None = None,
    split: int = 0,
    **keys: Any,
) -> Path:
    """`model` as a GGUF file; `kind` is of matrices, or says it for each name in the file.

    `tensors` replace others, or are added; None: left out. So do `keys`. With `split` there are
    several files of so many tensors, the first of which is returned.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    _write_keys(writer, config)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, keys.pop("tokenizer.ggml.pre", "gpt-2"))
    for key, value in keys.items():
        _write_key(writer, key, value)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied, other = config.tie_word_embeddings, dict(tensors or {})
    for number, (name, tensor) in enumerate(_tensors(model)):
        if (tied and name == "lm_head.weight") or name.endswith((".attn.bias", "masked_bias")):
            continue
        base, _, ending = name.rpartition(".")
        theirs = name if name.startswith("blk.") else f"{names.get_name(base)}.{ending}"
        values = _as_llama_cpp(theirs, tensor.float().contiguous().numpy(), config)
        values = other.pop(theirs, values)
        if values is None:
            continue
        asked = kind(theirs) if callable(kind) else kind
        numbers, _ = GGML_QUANT_SIZES[asked]
        fits = values.ndim > 1 and values.shape[1] % numbers == 0
        own = asked if fits else Type.F32
        writer.add_tensor(theirs, stored(values, own, number), raw_dtype=own)
    for theirs, values in other.items():
        writer.add_tensor(theirs, values, raw_dtype=Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    parts = len(writer.tensors)
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf") if split else path


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the model, experts apart and with llama.cpp's names."""
    for name, tensor in model.state_dict().items():
        if found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)", name):
            if found[2] == "down_proj":
                yield f"blk.{found[1]}.ffn_down_exps.weight", tensor
                continue
            gate, up = tensor.chunk(2, dim=1)
            yield f"blk.{found[1]}.ffn_gate_exps.weight", gate
            yield f"blk.{found[1]}.ffn_up_exps.weight", up
        else:
            yield name, tensor


def _write_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("rope_theta") or rope["full_attention"]["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    for values in writer.kv_data:
        values.pop(key, None)
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _as_llama_cpp(name: str, values: Any, config: Any) -> Any:
    """What its converters do to a tensor."""
    if config.model_type in ("llama", "mistral") and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if "_q." in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    if config.model_type.startswith("gemma") and "norm." in name:
        return values + 1
    if config.model_type == "gpt2" and values.ndim == 2 and name.startswith("blk."):
        return np.ascontiguousarray(values.T)
    return values


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, pre: str) -> None:
    """A byte-level BPE of transformers; `pre` names how it splits texts."""
    import json

    said = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in said["added_tokens"]}
    names = {place: token for token, place in tokenizer.get_vocab().items()}
    tokens = [names.get(place, f"[PAD{place}]") for place in range(max(names) + 1)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in said["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([
        gguf.TokenType.CONTROL if added.get(n, {}).get("special") else
        gguf.TokenType.USER_DEFINED if n in added else gguf.TokenType.NORMAL
        for n in range(len(tokens))
    ])  # fmt: skip
    writer.add_token_merges(merges)
    for name in ("bos", "eos", "pad"):
        place = getattr(tokenizer, f"{name}_token_id")
        if place is not None:
            getattr(writer, f"add_{name}_token_id")(place)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
