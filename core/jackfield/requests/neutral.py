"""Values of other engines' words (vLLM, SGLang, llama.cpp, TGI) that ask for what is so anyway.

What clients and configs write out though it is the default asks for nothing, and is no mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: keyword of loading -> its values that change nothing here
LOADING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("tensor_parallel_size", "tp", "num_shard", "pipeline_parallel_size", "pp_size", "nnodes",
         "data_parallel_size", "dp_size", "ep_size"), (1,),
    ),
    **dict.fromkeys(
        ("enable_expert_parallel", "sharded", "tensor_parallel", "enforce_eager",
         "disable_cuda_graph", "enable_lora", "use_mlock", "logits_all", "embedding_only",
         "disable_radix_cache", "numa", "embedding", "embeddings", "vocab_only"),
        (False,),
    ),
    **dict.fromkeys(
        ("enable_prefix_caching", "enable_radix_cache", "cache_prompt", "enable_chunked_prefill",
         "offload_kqv", "use_mmap"), (True,),
    ),
    **dict.fromkeys(
        ("disable_log_requests", "disable_log_stats", "fast_inference", "use_v2_block_manager"),
        (True, False),
    ),
    **dict.fromkeys(
        ("attention_backend", "flash_attn", "guided_decoding_backend", "tokenizer_mode"), ("auto",),
    ),
    **dict.fromkeys(
        ("cache_type_k", "cache_type_v", "kv_cache_dtype", "type_k", "type_v"),
        ("auto", "f16", "bf16", "f32"),
    ),
    **dict.fromkeys(
        ("n_ctx", "node_rank", "main_gpu", "swap_space", "cpu_offload_gb", "rope_freq_base",
         "rope_freq_scale"), (0,),
    ),
    **dict.fromkeys(("hf_overrides", "override_kv", "limit_mm_per_prompt"), ({},)),
    "warmup": (False,),
    "load_format": ("auto", "safetensors"),
    "runner": ("auto", "generate"),
}  # fmt: skip

#: setting of a call, or field of a body -> its values that change nothing here
REQUESTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "n_cmpl", "best_of", "num_return_sequences", "num_beams", "beam_width"),
                    (1,)),
    **dict.fromkeys(
        ("decoder_input_details", "details", "early_stopping", "echo", "ignore_eos",
         "include_stop_str_in_output", "no_stop_trim", "penalize_nl", "post_sampling_probs", "raw",
         "return_full_text", "return_tokens",
         "return_hidden_states", "return_logprob", "return_token_ids",
         "return_tokens_as_token_ids", "stream", "timings_per_token", "use_beam_search", "use_mtp",
         "use_tqdm", "watermark"), (False,),
    ),
    **dict.fromkeys(
        ("cache_prompt", "detokenize", "include_reasoning", "parse_tool_calls",
         "separate_reasoning", "skip_special_tokens", "spaces_between_special_tokens",
         "stream_reasoning"), (True,),
    ),
    **dict.fromkeys(
        ("diversity_penalty", "dry_multiplier", "dynatemp_range", "epsilon_cutoff", "eta_cutoff",
         "min_keep", "min_length", "min_new_tokens", "min_tokens", "mirostat", "mirostat_mode",
         "n_discard", "n_keep", "n_probs", "no_repeat_ngram_size", "priority", "quadratic_sampling",
         "top_a", "top_logprobs_num", "top_n_tokens", "xtc_probability"), (0,),
    ),
    **dict.fromkeys(
        ("dynatemp_exponent", "length_penalty", "rep_pen", "repeat_penalty", "tfs", "tfs_z",
         "typical_p"), (1,),
    ),
    **dict.fromkeys(
        ("dry_penalty_last_n", "id_slot", "repeat_last_n", "slot_id", "top_n_sigma"), (-1,)
    ),
    **dict.fromkeys(
        ("bad_words", "logits_processors", "samplers", "stop_ids", "stop_sequences",
         "stop_strings", "stop_token_ids", "stop_words", "stopping_strings", "sequence_bias"),
        ([],),
    ),
    **dict.fromkeys(
        ("extra_body", "kv_transfer_params", "logit_bias", "mm_processor_kwargs", "options",
         "parameters", "params", "vllm_xargs"), ({},),
    ),
    # what comes into play beside another one alone
    "dry_allowed_length": (2,), "dry_base": (1.75,), "mirostat_eta": (0.1,), "mirostat_tau": (5,),
    "xtc_threshold": (0.1,),
    "reasoning_format": ("auto", "deepseek"),
    "guided_decoding_backend": ("auto",),
    "response_format": ({"type": "text"},),
    "top_k": (-1,),
}  # fmt: skip


#: What a word is given that is not used, of whatever kind its values are; {} may be a schema.
_NOTHING: tuple[Any, ...] = ("", [], ())
#: Words of which nothing may be a wish: no token, no text before the first message.
_WISHES = frozenset(
    {"allowed_token_ids", "guided_choice", "guided_json", "guided_regex", "guided_grammar",
     "guided_decoding", "structured_outputs", "structural_tag", "response_format",
     "response_schema", "json_object", "ebnf", "gbnf", "system", "system_prompt"}
)  # fmt: skip
#: A text without a bound is what these ask for that are None, and no more than they ask for else.
BOUNDS = frozenset(
    {"max_tokens", "n_predict", "num_predict", "max_completion_tokens", "max_output_tokens",
     "max_gen_len", "max_gen_length"}
)  # fmt: skip


def asks_for_nothing(table: Mapping[str, tuple[Any, ...]], name: str, value: Any) -> bool:
    """Whether `value` is a neutral one of the word `name`: one of a table above, or nothing."""
    if value is None:
        return name not in BOUNDS
    empty = () if name in BOUNDS | _WISHES else _NOTHING
    return any(_same(value, inert) for inert in (*table.get(name, ()), *empty))


def _same(value: Any, inert: Any) -> bool:
    kinds = (int, float) if type(inert) in (int, float) else (type(inert),)
    return type(value) in kinds and bool(value == inert)
