"""Small encoder-decoder models of every type, with weights that make all that was read count."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from jackfield.bridge.batch_trial import drawn
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.shrinking import shrunk

START = 2
_GEMMA = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
#: Configs that cannot be made small by themselves.
_OWN: dict[str, dict[str, Any]] = {
    "t5gemma": {"encoder": dict(_GEMMA), "decoder": dict(_GEMMA), "vocab_size": 97},
    "plbart": {
        "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    },
}  # fmt: skip


def _is_one(name: str) -> bool:
    try:
        return bool(transformers.AutoConfig.for_model(name).is_encoder_decoder)
    except ValueError:  # it is made of two others, which some versions want to be given
        return False


TYPES = [name for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if _is_one(name)]


def _size(config: transformers.PreTrainedConfig) -> int:
    return sum(p.numel() for p in meta_model(config).parameters())


@torch.no_grad()
def build(model_type: str, **changes: Any) -> Any:
    """A model of that type; `changes` are fields of its config."""
    own = _OWN.get(model_type)
    config: Any = transformers.AutoConfig.for_model(model_type, **(own or {}))
    if own is None:
        config = min(list(shrunk(config, None))[1::2], key=_size)
        if (layers := getattr(config, "num_decoder_layers", None)) is not None:
            config.num_layers = layers  # transformers 5.22 counts the encoder's for the cache
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = drawn(config, None, torch.float32)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=START, pad_token_id=0, eos_token_id=1
    )
    return model


def generated(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    """The new tokens of transformers' `generate`, of one prompt alone."""
    rows = model.generate(torch.tensor([prompt]), **{"do_sample": False, **settings})
    return rows[0].tolist()[1:]  # type: ignore[no-any-return]
