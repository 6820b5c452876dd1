"""How large everything is: on a GPU, and for the test that runs all of it on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Llama-3.1-8B.
EIGHT_BILLION = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TINY = {
    **EIGHT_BILLION,
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
#: A model whose steps are those of a large one in number, and quick.
_SHALLOW = {**EIGHT_BILLION, "vocab_size": 32000, "num_hidden_layers": 4, "hidden_size": 2048,
            "intermediate_size": 4096}  # fmt: skip

#: Families that between them have what packed attentions must have: GQA, MQA, windows, softcaps,
#: sinks, biases, experts, learned positions, ALiBi, partial rotary, latent and linear attention.
FAMILIES = (
    "llama", "llama-mqa", "llama-wide-heads", "mistral", "qwen2", "qwen3", "gemma2", "gemma3",
    "gpt2", "opt", "phi3", "falcon-alibi", "mixtral", "gpt-oss", "deepseek-v3", "qwen3-next",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, memory in bytes."""

    head_dims: tuple[int, ...] = (64, 80, 128, 256)
    groups: tuple[tuple[int, int], ...] = ((32, 8), (8, 8), (71, 1))  # heads, heads of keys
    steps: tuple[tuple[tuple[int, int], ...], ...] = (
        ((1, 4097),),
        ((1, 1), (1, 17), (1, 640), (1, 2049)),
        ((700, 700), (33, 33), (1, 1)),
        ((4, 300), (1, 1000), (129, 513)),
    )  # (queries, keys) of each sequence
    page_sizes: tuple[int, ...] = (32, 16, 256)
    window: int = 37
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    norms: tuple[tuple[int, int], ...] = ((1, 4096), (33, 2880), (2048, 4096))  # rows, numbers
    families: tuple[str, ...] = FAMILIES
    prompts: tuple[int, ...] = (6, 7, 8, 9, 24)
    new_tokens: int = 18
    swapped: int = 64  # tokens in a pool that is too small for all prompts together
    counted: dict[str, Any] = field(default_factory=lambda: dict(_SHALLOW))
    counted_batch: int = 8
    counted_tokens: int = 48
    longest: int = 1100  # how far one sequence decodes while compilations are counted
    large: dict[str, Any] = field(default_factory=lambda: dict(EIGHT_BILLION))
    large_dtype: str = "bfloat16"
    decode_prompt: int = 32
    decode_tokens: int = 48
    rounds: int = 3
    batch: int = 32
    batch_prompt: int = 128
    prefills: tuple[int, ...] = (2048, 32768)
    copied: int = 1 << 30
    quantizers: tuple[str, ...] = ("bnb-8bit", "bnb-4bit", "torchao", "gptq")


GPU = Sizes()
TINY = Sizes(
    head_dims=(16,),
    groups=((4, 2),),
    steps=(((1, 9), (1, 3)), ((3, 7), (5, 5))),
    page_sizes=(4,),
    window=3,
    dtypes=("float32",),
    norms=((3, 24),),
    families=("llama", "gpt-oss"),
    prompts=(3, 5),
    new_tokens=3,
    swapped=10,
    counted=_TINY,
    counted_batch=2,
    counted_tokens=3,
    longest=6,
    large=_TINY,
    large_dtype="float32",
    decode_prompt=4,
    decode_tokens=2,
    rounds=1,
    batch=2,
    batch_prompt=5,
    prefills=(16,),
    copied=1 << 16,
    quantizers=("nonesuch",),
)
