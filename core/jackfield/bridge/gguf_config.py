"""The config and the tokenizer that a GGUF file describes, as transformers makes them of it.

transformers reads every token of the vocabulary for a config, which takes ten seconds where there
are 150,000. So it is shown a small file: the same keys without long lists, and the same names of
tensors.
"""

from __future__ import annotations

import json
import logging
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from jackfield.bridge.gguf_header import MAGIC, Array, GgufHeader
from jackfield.bridge.gguf_rope import rope_of
from jackfield.bridge.gguf_splits import UNNAMED, WITH_BOS, knows, split_as
from jackfield.errors import CheckpointError, quoted, shown
from jackfield.foreign import named

logger = logging.getLogger("jackfield")
_LONG = 10_000  # entries of a list that no config has

#: What changes a model's numbers, and the field of a config for it. Not every mapping of
#: transformers has them all, and defaults would take their place.
_MEANINGS: Mapping[str, str] = {
    "attention.key_length": "head_dim",
    "attention.scale": "attention_multiplier",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "residual_scale": "residual_multiplier",
}

#: How the file names the tokens that transformers knows by name, and how transformers does.
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
#: Vocabularies before whose texts llama.cpp writes a BOS where the file does not say.
_WITH_BOS = ("llama", *WITH_BOS)
_BYTE_LEVEL = "gpt2"  # how a file names a byte-level vocabulary, whoever has it


def config_of(header: GgufHeader) -> PreTrainedConfig:
    """The config of the model in a file. Raises CheckpointError: transformers knows no such
    architecture, or the file says what has no place in its config.
    """
    _check_architecture(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path} has no matrix token_embd.weight; give another file")
    with tempfile.TemporaryDirectory(prefix="jackfield-gguf-") as folder:
        Path(folder, "small.gguf").write_bytes(_without_lists(header))
        with named(f"transformers makes no config of {header.path}"):
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder,
                gguf_file="small.gguf",
                trust_remote_code=False,
                vocab_size=embedding.shape[0],
            )
    config.name_or_path = str(header.path)
    config.dtype = _dtype(header)
    _take_over(header, config)
    _set_scale(config)
    for name in ("bos", "eos"):  # or the class's own defaults would stand
        if f"tokenizer.ggml.{name}_token_id" not in header.values:
            setattr(config, f"{name}_token_id", None)
    rope_of(header, config)
    return config


def _check_architecture(header: GgufHeader) -> None:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = {name.replace("_", "") for name in GGUF_SUPPORTED_ARCHITECTURES}
    known -= {"general", "tokenizer", "t5", "umt5"}
    if header.architecture == "clip":
        raise CheckpointError(
            f"{header.path} is the part of a model that reads images or sounds (mmproj); give the "
            "file of the model itself"
        )
    if header.values.get("general.type") == "adapter":
        raise CheckpointError(
            f"{header.path} is an adapter; give the model's file, and the adapter as PEFT keeps it"
        )
    if header.architecture.replace("-", "").replace("_", "") not in known:
        raise CheckpointError(
            f"{header.path} is of architecture {header.architecture!r}, which transformers "
            "reads from no GGUF file; give the model's folder or hub id"
        )


def _dtype(header: GgufHeader) -> torch.dtype:
    """Of activations, where nobody names one: that of the values in the file; with blocks bfloat16,
    in which kernels compute.
    """
    types = {tensor.type for tensor in header.tensors.values()}
    if types <= {"F32"}:
        return torch.float32
    return torch.float16 if types <= {"F32", "F16"} else torch.bfloat16


def _take_over(header: GgufHeader, config: PreTrainedConfig) -> None:
    for key, field in _MEANINGS.items():
        value = header.own(key)
        if value is None or value == 0 or isinstance(value, Array):
            continue
        if hasattr(config, field):
            with named(f"{header.path} says {key} = {shown(value)}"):
                setattr(config, field, value)
        elif field != "head_dim" or value * config.num_attention_heads != config.hidden_size:
            raise CheckpointError(
                f"{header.path} says {key} = {shown(value)}, for which a {type(config).__name__} "
                "of transformers has no field; give the model's folder or hub id"
            )


def _set_scale(config: PreTrainedConfig) -> None:
    """The size of Gemma's queries, which llama.cpp tells by the number of layers: it is that of a
    head, but for the two models of 27 billion.
    """
    if hasattr(config, "query_pre_attn_scalar"):
        widest = config.hidden_size // config.num_attention_heads
        layers = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
        config.query_pre_attn_scalar = (
            widest if config.num_hidden_layers == layers else config.head_dim
        )


def _without_lists(header: GgufHeader) -> bytes:
    """A file of the same keys less long lists, and of tensors of one number each."""
    keys, table = [], []
    with header.path.open("rb") as file:
        for key, (begin, end) in header.raw.items():
            value = header.values[key]
            long = isinstance(value, Array) and value.count > _LONG
            if not long and key != "general.alignment":
                file.seek(begin)
                keys.append(file.read(end - begin))
    for number, name in enumerate(header.tensors):
        text = name.encode()
        one_float = struct.pack("<IQIQ", 1, 1, 0, number * 32)
        table.append(struct.pack("<Q", len(text)) + text + one_float)
    start = MAGIC + struct.pack("<IQQ", 3, len(header.tensors), len(keys))
    whole = b"".join([start, *keys, *table])
    return whole + bytes(-len(whole) % 32 + 32 * len(header.tensors))


def tokenizer_of_file(header: GgufHeader, config: PreTrainedConfig) -> Any | None:
    """The tokenizer of a file; None where it has no vocabulary. Raises CheckpointError."""
    described = _described(header)
    if "tokens" not in described:
        return None
    with named(f"transformers makes no tokenizer of {header.path}"):
        made, _ = _convert(config.model_type, described)
        made = _of_the_list(made, len(described["tokens"]))
    if described.get("tokenizer_type") == _BYTE_LEVEL:
        _split(made, described.get("pre_tokenizer_type"), header)
    own: dict[str, Any] = {}
    for name, ours in _SPECIAL.items():
        place = header.values.get(f"tokenizer.ggml.{name}_token_id")
        if place is not None:
            own[f"{ours}_token"] = _token(described["tokens"], place, header)
    kinds = described.get("tokenizer_type"), described.get("pre_tokenizer_type")
    usual = any(kind in _WITH_BOS for kind in kinds)
    begins = header.values.get("tokenizer.ggml.add_bos_token", usual)
    ends = header.values.get("tokenizer.ggml.add_eos_token", False)
    template = header.values.get("tokenizer.chat_template")
    with named(f"the tokenizer of {header.path}"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made,
            add_bos_token=bool(begins) and "bos_token" in own,
            add_eos_token=bool(ends) and "eos_token" in own,
            **own,
        )
        tokenizer("")
    if isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer


def _described(header: GgufHeader) -> dict[str, Any]:
    """What transformers wants to know of a vocabulary, under its names."""
    from transformers import modeling_gguf_pytorch_utils

    names: Any = modeling_gguf_pytorch_utils.GGUF_TO_TRANSFORMERS_MAPPING
    found: dict[str, Any] = {}
    for key, name in names["tokenizer"]["tokenizer"].items():
        value = header.values.get(f"tokenizer.{key}")
        if value is not None:
            long = isinstance(value, Array)
            found[name] = header.array(f"tokenizer.{key}") if long else value
    # Which tokens these are is told to the tokenizer that is made; transformers 5.17 confuses them.
    return found | {"bos_token_id": None, "eos_token_id": None}


def _convert(model_type: str, described: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """transformers' own conversion, which has moved between its versions."""
    from transformers.integrations import ggml, gguf

    places: tuple[Any, ...] = (gguf, ggml)
    place = next(p for p in places if hasattr(p, "convert_gguf_tokenizer"))
    return place.convert_gguf_tokenizer(model_type, described)  # type: ignore[no-any-return]


def _of_the_list(made: Tokenizer, count: int) -> Tokenizer:
    """Without tokens beyond the file's, which transformers adds for names that it has by default:
    the model has no rows for them.
    """
    if made.get_vocab_size() <= count:
        return made
    said = json.loads(made.to_str())
    said["added_tokens"] = [one for one in said["added_tokens"] if one["id"] < count]
    return Tokenizer.from_str(json.dumps(said))


def _split(made: Tokenizer, name: object, header: GgufHeader) -> None:
    if not knows(name):
        raise CheckpointError(
            f"{header.path} splits texts as {quoted(name)} does (tokenizer.ggml.pre), which is not "
            "known here; give tokenizer=… of the model that it was made of"
        )
    if name in UNNAMED:
        logger.warning(
            "%s does not say how its vocabulary splits texts (tokenizer.ggml.pre): it is done as "
            "GPT-2 does; where the model has another way, give tokenizer=…", header.path
        )  # fmt: skip
    split_as(made, name)


def _token(tokens: list[str], place: Any, header: GgufHeader) -> str:
    if not isinstance(place, int) or not 0 <= place < len(tokens):
        raise CheckpointError(
            f"{header.path} names token {shown(place)} of {len(tokens)}; fetch it again"
        )
    return tokens[place]
