"""Small models with random weights and sharp settings, so that what a backend gets wrong shows.

Weights are drawn wide and embeddings are untied: what a model says depends on everything that it
has read. Windows are shorter than the prompts, caps on scores are low, and no two sizes are equal
(heads, queries, keys, head sizes), so that what is exchanged cannot go unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any

import torch
import transformers

from jackfield.bridge.model_layers import own_implementation

VOCAB = 97
WINDOW = 4
CONTEXT = 192

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = ["sliding_attention", "full_attention"]
_NO_GROUPS = {"num_key_value_heads": 4}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

#: name -> the config's class, and its arguments. Named for what the attention needs.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "plain": ("LlamaConfig", {**_COMMON, **_NO_GROUPS}),
        "grouped_query": ("LlamaConfig", {**_COMMON, "head_dim": 10}),
        "multi_query": ("LlamaConfig", {**_COMMON, "num_key_value_heads": 1}),
        "sliding_window": ("MistralConfig", {**_COMMON, "sliding_window": WINDOW}),
        "mixed_windows": (
            "Qwen2Config",
            {
                **_COMMON,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "max_window_layers": 1,
            },
        ),
        "softcap": (
            "Gemma2Config",
            {
                **_COMMON,
                "head_dim": 12,
                "query_pre_attn_scalar": 7,
                "attn_logit_softcapping": 0.05,
                "sliding_window": WINDOW,
                "layer_types": _MIXED,
            },
        ),
        "sinks": (
            "GptOssConfig",
            {
                **_COMMON,
                "head_dim": 12,
                "sliding_window": WINDOW,
                "layer_types": _MIXED,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "rope_parameters": _PLAIN_ROPE,
            },
        ),
        "mixed_head_sizes": (
            "DeepseekV3Config",
            {
                **_COMMON,
                **_NO_GROUPS,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 6,
                "v_head_dim": 10,
                "first_k_dense_replace": 2,
            },
        ),
        "chunked": (
            "Llama4TextConfig",
            {
                **_COMMON,
                **_NO_GROUPS,
                "head_dim": 12,
                "attention_chunk_size": WINDOW,
                "layer_types": ["chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0],
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 40,
            },
        ),
        "bidirectional_prefix": (
            "HrmTextConfig",
            {**_COMMON, "head_dim": 12, "H_cycles": 1, "L_cycles": 1, "prefix_lm": True},
        ),
        "own_mask": ("DogeConfig", {**_COMMON, **_NO_GROUPS}),
        "position_bias": ("FalconConfig", {**_COMMON, "alibi": True}),
        "own_attention": (
            "BloomConfig",
            {
                "vocab_size": VOCAB,
                "hidden_size": 48,
                "n_layer": 2,
                "n_head": 4,
                "initializer_range": 0.35,
                "tie_word_embeddings": False,
                "bos_token_id": None,
                "eos_token_id": None,
            },
        ),
        "linear": (
            "Qwen3NextConfig",
            {
                **_COMMON,
                "head_dim": 12,
                "layer_types": ["linear_attention", "full_attention"],
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 24,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
        ),
        "convolution": (
            "Lfm2Config",
            {
                **_COMMON,
                "layer_types": ["conv", "full_attention"],
                "block_auto_adjust_ff_dim": False,
            },
        ),
        "shared_layers": (
            "Gemma3nTextConfig",
            {
                **_COMMON,
                "pad_token_id": 0,
                "num_hidden_layers": 4,
                "head_dim": 8,
                "sliding_window": WINDOW,
                "layer_types": _MIXED * 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
                "activation_sparsity_pattern": [0.0] * 4,
            },
        ),
    }
)

#: Configs of models whose layers are of other classes; of the same sizes.
FAMILIES = tuple(
    name
    for name in (
        "Olmo2Config", "Qwen3Config", "Phi3Config", "Gemma3TextConfig", "CohereConfig",
        "GPTNeoXConfig", "Starcoder2Config", "MixtralConfig", "GraniteConfig", "NemotronConfig",
        "Glm4Config", "SmolLM3Config", "Exaone4Config", "PhiConfig", "GemmaConfig", "ArceeConfig",
        "Ernie4_5Config", "HunYuanDenseV1Config", "SeedOssConfig",
    )
    if hasattr(transformers, name)
)  # fmt: skip


def arguments_of(name: str) -> tuple[str, dict[str, Any]]:
    """The class and the arguments of the config of one of `MODELS`, or of `FAMILIES`."""
    return MODELS.get(name) or (name, {**_COMMON, "head_dim": 12})


def config_of(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    """The config of one of `MODELS` or `FAMILIES`, with `changes` to its arguments."""
    cls, arguments = arguments_of(name)
    config = getattr(transformers, cls)(**{**arguments, **changes})
    config._experts_implementation = "eager"  # the grouped product takes no float64
    return config  # type: ignore[no-any-return]


def build(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> transformers.PreTrainedModel:
    """A new model with the weights of `seed`, in eval mode, on the CPU.

    `changes` are those of `config_of`.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(name, **changes), attn_implementation="eager"
        )
        for own, parameter in model.named_parameters():
            if "sink" in own:
                torch.nn.init.normal_(parameter)
    model.config._attn_implementation = own_implementation(model)
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()  # type: ignore[no-any-return]


class Reference:
    """What a model says when all is computed again: one sequence alone, eager, in float64.

    `bound` is how far logits in the model's own dtype may be off, as an absolute number: four times
    what plain transformers is off in that dtype, over the same tokens.

    `prompts` are given where a model reads the whole of one in both directions.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, prompts: Seq[tuple[int, ...]] = ()
    ) -> None:
        self._prompts = prompts
        self._own = copy.deepcopy(model).eval()
        self._own.config._attn_implementation = own_implementation(model)
        self._exact = copy.deepcopy(self._own).double()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """float64 `[tokens, vocab]`: what follows each of `tokens`. Kept, and not to be changed."""
        for known, logits in self._known.items():
            if known[: len(tokens)] == tokens:
                return logits[: len(tokens)]
        found = _all_logits(self._exact, tokens, self._prefix(tokens)).double()
        self._known[tokens] = found
        return found

    def bound(self, tokens: tuple[int, ...]) -> float:
        """See the class."""
        exact = self.logits(tokens)
        plain = _all_logits(self._own, tokens, self._prefix(tokens)).double()
        # Attentions of transformers softmax in float32, also in float64.
        eps = max(torch.finfo(dtype).eps for dtype in (self._own.dtype, torch.float32))
        least = 32 * eps * float(exact.std())
        return max(4 * float((plain - exact).abs().max()), least)

    def _prefix(self, tokens: tuple[int, ...]) -> int:
        """How many of `tokens` are a prompt that is read in both directions."""
        return max((len(p) for p in self._prompts if tokens[: len(p)] == p), default=0)


@torch.inference_mode()
def _all_logits(
    model: transformers.PreTrainedModel, tokens: tuple[int, ...], prefix: int
) -> torch.Tensor:
    ids = torch.tensor([tokens], device=model.device)
    kinds = {}
    if prefix:
        kinds["token_type_ids"] = (torch.arange(len(tokens), device=model.device) < prefix).long()[
            None
        ]
    return model(input_ids=ids, use_cache=False, **kinds).logits[0].cpu()  # type: ignore[no-any-return]
