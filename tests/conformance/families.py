"""Tiny random-weight models of real architectures: one row a family.

Weights are drawn wide and embeddings are untied, so that what a model says depends on everything
it has read; with transformers' own initial range, parity proves little.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
import torch
import transformers

VOCAB = 120
WINDOW = 8
#: Whether states of linear-attention layers can be kept beside pages.
STATES_APART = hasattr(transformers.Cache, "get_conv_state")
CONTEXT = 128

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GATED = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Family:
    """A config class with its arguments. `refused` is attention -> the feature it lacks."""

    config: str
    arguments: Mapping[str, Any]
    refused: Mapping[str, str] = field(default_factory=dict)


#: What transformers calls a model's own attention where that is not "eager".
OWN = {"falcon-alibi": "sdpa"}
FAMILIES = {
    "llama": Family("LlamaConfig", _GATED),
    "llama-mqa": Family("LlamaConfig", {**_GATED, "num_key_value_heads": 1}),
    "llama-wide-heads": Family("LlamaConfig", {**_GATED, "head_dim": 24}),
    "mistral": Family("MistralConfig", {**_GATED, "sliding_window": WINDOW}),
    "qwen2": Family(
        "Qwen2Config",
        {**_GATED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": Family("Qwen3Config", {**_GATED, "head_dim": 16}),
    "gemma2": Family(
        "Gemma2Config",
        {
            **_GATED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
        },
        {"sdpa": "softcap"},
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {
            **_GATED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _MIXED_LAYERS,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt2": Family("GPT2Config", _COMMON),
    "opt": Family(
        "OPTConfig",
        {
            **{k: v for k, v in _COMMON.items() if k != "initializer_range"},
            "init_std": 0.35,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "pad_token_id": 1,
        },
    ),
    "phi3": Family("Phi3Config", {**_GATED, "sliding_window": WINDOW}),
    "falcon-alibi": Family("FalconConfig", {**_COMMON, "alibi": True}, {"sdpa": "position_bias"}),
    "mixtral": Family(
        "MixtralConfig",
        {**_GATED, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            **_GATED,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _MIXED_LAYERS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _PLAIN_ROPE,
        },
        {"sdpa": "sinks"},
    ),
}


_BARE = {
    "vocab_size": VOCAB,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

#: For the composition table only, beside those above.
MORE_FAMILIES = {
    "gpt-neox": Family("GPTNeoXConfig", {**_COMMON, "intermediate_size": 48, "rotary_pct": 0.25}),
    "stablelm": Family(
        "StableLmConfig",
        {**_GATED, "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.25}},
    ),
    "olmo2": Family("Olmo2Config", _GATED),
    "smollm3": Family("SmolLM3Config", _GATED),
    "granite": Family("GraniteConfig", _GATED),
    "cohere2": Family(
        "Cohere2Config", {**_GATED, "sliding_window": WINDOW, "layer_types": _MIXED_LAYERS}
    ),
    "qwen3-moe": Family("Qwen3MoeConfig", {**_GATED, **_MOE, "head_dim": 16}),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        {
            **_GATED,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {
            **_GATED,
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
        },
    ),
    "lfm2": Family(
        "Lfm2Config",
        {**_GATED, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {
            **_GATED,
            **_MOE,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "diffllama": Family("DiffLlamaConfig", _GATED),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        {
            **_GATED,
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _MIXED_LAYERS * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        },
    ),
    # Layers with a window have other heads than those without; the last two share theirs.
    "gemma4": Family(
        "Gemma4TextConfig",
        {
            **_GATED,
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": WINDOW,
            "layer_types": _MIXED_LAYERS * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "hrm-text": Family(
        "HrmTextConfig",
        {
            **_COMMON,
            "intermediate_size": 48,
            "head_dim": 8,
            "H_cycles": 1,
            "L_cycles": 2,
            "prefix_lm": True,
        },
    ),
    "bloom": Family("BloomConfig", {**_BARE, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


def config_of(name: str) -> transformers.PreTrainedConfig:
    family = FAMILIES.get(name) or MORE_FAMILIES[name]
    config = getattr(transformers, family.config)(**family.arguments)
    config._experts_implementation = "eager"  # the grouped product takes no float64
    return config


def build(name: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    """A fresh model of the family, always with the same weights, running its own attention."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(name), attn_implementation=OWN.get(name, "eager")
        )
        for parameter_name, parameter in model.named_parameters():
            if "sink" in parameter_name:
                torch.nn.init.normal_(parameter)
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Random token ids of these lengths, always the same ones; no special id among them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def oracle(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens from plain transformers, one sequence by itself."""
    ids = torch.tensor([prompt])
    kwargs = {"attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "prefix_lm", False):  # the whole prompt is the prefix
        kwargs["token_type_ids"] = torch.ones_like(ids)
    output = model.generate(ids, **kwargs, max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


@functools.cache
def references(name: str, lengths: tuple[int, ...], count: int) -> list[list[int]]:
    model = build(name)
    return [oracle(model, prompt, count) for prompt in prompts(lengths)]


def character_tokenizer(*, backwards: bool = False) -> transformers.PreTrainedTokenizerBase:
    """One character a token, `VOCAB` of them, with a chat template; "<end>" is the last one.

    `backwards`: the same tokens, with ids that count down.
    """
    characters = [chr(i) for i in [*range(32, 127), *range(0xC0, 0xC0 + VOCAB - 96)]]
    ids = reversed(range(VOCAB)) if backwards else range(VOCAB)
    vocab = dict(zip([*characters, "<end>"], ids, strict=True))
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<end>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    # llguidance reads no decoder but one that knows bytes; none of the tokens is a byte
    plain.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<end>", eos_token="<end>"
    )
    found.chat_template = (
        "{% for m in messages %}{% if m.role not in ('user', 'system') %}"
        r"{{ raise_exception('no role ' + m.role + '\n' + 'here') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}{% endfor %}>"
    )
    return found
