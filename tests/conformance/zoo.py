"""Every causal type of the installed transformers, tiny and with random weights, by one recipe.

A type takes those arguments of `SIZES` that its config knows; `OWN` holds what it must have
otherwise. Windows and sparse attention are smaller than the prompts of the sweep.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from families import VOCAB
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW = 5
SPARSE = 4

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.35,
    "init_std": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "is_decoder": True,
    # names of older types
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # what is seen
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "attention_chunk_size": WINDOW,
    "keep_window_size": SPARSE,
    "index_topk": SPARSE,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
OWN: Mapping[str, Mapping[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "camembert": {"pad_token_id": 1},
    "data2vec-text": {"pad_token_id": 1},
    "roberta": {"pad_token_id": 1},
    "roberta-prelayernorm": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "xlm-roberta-xl": {"pad_token_id": 1},
    "opt": {"pad_token_id": 1, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"pad_token_id": 1, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2},
    "modernbert-decoder": {"pad_token_id": 0, "layer_types": ["sliding_attention"] * 2},
    "deepseek_v2": {**_LATENT, "head_dim": 8},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "longcat_flash": {
        **_LATENT, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 2,
        "moe_topk": 2, "num_layers": 1,
    },
    "kimi_linear": _LATENT,
    "dots1": {"n_shared_experts": 1},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen4_exp_text": _LINEAR,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    "prophetnet": {"pad_token_id": 0, "num_decoder_layers": 2, "num_decoder_attention_heads": 4},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
    "gpt_neo": {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
    },
    "gemma3n_text": {
        "pad_token_id": 0,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": {**_MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48,
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8},
    "zamba2": {"mamba_ngroups": 1, "n_mamba_heads": 8, "layers_block_type": ["mamba", "hybrid"]},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "whisper": {"decoder_attention_heads": 4},
    "plbart": {"encoder_attention_heads": 4},
}  # fmt: skip
MOST_NUMBERS = 40_000_000  # parameters; what is larger than this is not tiny


def config_of(model_type: str) -> transformers.PreTrainedConfig:
    """A tiny config of a type. Raises whatever its class does where the recipe is not for it."""
    cls = CONFIG_MAPPING[model_type]
    known = set(getattr(cls, "__dataclass_fields__", ()))
    known |= set(inspect.signature(cls.__init__).parameters)
    given = {**SIZES, **OWN.get(model_type, {})}
    arguments = {name: value for name, value in given.items() if name in known}
    try:
        config = cls(**arguments)
    except Exception:  # noqa: BLE001 - some want their tokens to be numbers
        ids = {name: 0 for name in arguments if name.endswith("_token_id")}
        config = cls(**{**arguments, **ids})
    config._experts_implementation = "eager"  # the grouped product takes no float64
    return config


def build(model_type: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    """A fresh model of a type, always with the same weights, running its own attention."""
    config = config_of(model_type)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    numbers = sum(parameter.numel() for parameter in empty.parameters())
    if numbers > MOST_NUMBERS:
        raise ValueError(f"the recipe makes it {numbers / 1e6:.0f} million parameters large")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # what begins as zeros or ones leaves ties
                    spread = 1.0 if "sink" in name else 0.1
                    parameter.add_(spread * torch.randn_like(parameter))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()
