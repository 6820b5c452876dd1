"""Words of other engines (vLLM, SGLang, llama.cpp, TGI, Ollama), and what to write here instead.

Data for messages: what stands behind "write" is an argument that is taken as it is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_CONTEXT = (
    "the context is the model's, and max_new_tokens=N bounds a call; what is kept is bounded by "
    "cache_implementation='paged?num_tokens=8192'"
)
_CONFIG = "it stands in the model's config"
_ALWAYS = "it is always so; drop it"
_NONE = "there is nothing like it here; drop it"

#: answer -> keywords by which others load a model, or of their `generate`, each in snake case.
_LOADING: Mapping[str, str] = {
    "write tp_size=2": "tensor_parallel_size tp num_shard tensor_parallel",
    "processes of one machine share a model's layers: tp_size=N": "pipeline_parallel_size pp_size "
    "sharded distributed_executor_backend nnodes node_rank",
    "write tp_size=2 and expert_parallel=True": "enable_expert_parallel ep_size",
    "`jackfield serve --replicas N` has several engines": "data_parallel_size dp_size",
    _CONTEXT: "max_model_len ctx_size context_length n_ctx num_ctx max_context_length context_size "
    "max_seq_len max_seq_length max_total_tokens max_input_length max_input_tokens",
    "write cache_implementation='paged?memory=0.9', a share of what is free": "gpu_memory_"
    "utilization cache_max_entry_count mem_fraction_static cuda_memory_fraction "
    "kv_cache_free_gpu_memory_fraction",
    "write cache_implementation='paged?num_tokens=8192'": "max_batch_total_tokens "
    "num_gpu_blocks_override",
    "write cache_implementation='paged?page_size=16'": "block_size page_size cache_block_seq_len",
    "write cache_implementation='paged?prefix_sharing=no' to turn it off": "enable_prefix_caching "
    "disable_radix_cache cache_prompt enable_radix_cache",
    "write cache_implementation='paged?swap=yes'": "swap_space",
    "write cache_implementation='quantized?nbits=4', or with hqq "
    "cache_implementation='quantized?backend=hqq&nbits=8'": ""
    "kv_cache_dtype type_k type_v cache_type_k cache_type_v quant_policy",
    "a GPU takes the whole model by itself; to part it, write max_memory={0: '10GB', 'cpu': '40GB'}"
    "": "cpu_offload_gb n_gpu_layers gpu_layers num_gpu_layers num_gpu tensor_split main_gpu "
    "split_mode offload_kqv",
    "write attn_implementation='sdpa', or another name": "attention_backend flash_attn "
    "use_flash_attention use_flash_attn",
    "write quantization='int8-cpu', or another name": "quantize quant quant_method",
    "write compile='inductor', or another name": "compilation_config cuda_graphs "
    "enable_torch_compile torch_compile use_cuda_graph",
    "write compile='none'": "enforce_eager disable_cuda_graph",
    "write decoding='assisted' and assistant_model='demo-draft', with a model of yours": "draft_"
    "model speculative_config speculative_model model_draft speculative_algorithm "
    "speculative_draft_model_path",
    "write decoding='assisted?num_assistant_tokens=5' and assistant_model='demo-draft', with "
    "yours": "num_speculative_tokens draft_max num_pred_tokens",
    "write max_batch_size=8": "max_num_seqs max_running_requests n_parallel parallel "
    "max_concurrent_requests n_seq_max",
    "write max_batch_tokens=512": "max_num_batched_tokens max_batch_prefill_tokens n_batch "
    "n_ubatch max_prefill_tokens ubatch_size",
    "write prefill_chunk_size=512": "chunked_prefill_size long_prefill_token_threshold",
    "write max_waiting=100": "max_queued_requests",
    "write scheduler='fifo', or another name": "scheduling_policy schedule_policy",
    "write adapter='FOLDER' for one, or name several in adapters": "enable_lora lora "
    "lora_path lora_modules lora_paths lora_adapters lora_base",
    "write image_hosts=['example.org']": "allowed_media_domains media_url_whitelist",
    "write max_adapters=8": "max_loras max_cpu_loras max_loras_per_batch",
    "the model is the first argument, without a name: a hub id, a folder, or a GGUF file": "model_"
    "path model_id hf_repo repo_id model_name filename",
    "set OMP_NUM_THREADS=N in the environment": "n_threads num_threads threads n_threads_batch",
    "set HF_HUB_CACHE=FOLDER in the environment": "download_dir weights_cache_override",
    "give a tokenizer with it: tokenizer=…": "chat_format tokenizer_mode",
    _CONFIG: "rope_freq_base rope_freq_scale rope_scaling rope_theta hf_overrides override_kv",
    _ALWAYS: "enable_chunked_prefill use_mmap use_v2_block_manager fast_inference",
    "texts are made here, and nothing else": "runner embedding_only embedding embeddings",
    "images of a chat are read up to what the context holds; drop it": "limit_mm_per_prompt "
    "mm_processor_kwargs",
    "an adapter may have any rank; drop it": "max_lora_rank",
    "a model stays until its engine is closed; drop it": "keep_alive",
    "set HF_TOKEN=… in the environment, or run `hf auth login`": "hf_token",
    "images are read by models in transformers' form, not by a GGUF file": "mmproj clip_model_path",
    "weights are read when a step needs them, and nothing is tried before; drop it": "warmup",
    _NONE: "vocab_only chat_handler cache_reuse cache_ram kv_unified cpu_moe async_scheduling prio "
    "use_mlock numa served_model_name disable_log_stats disable_log_requests load_format "
    "max_seq_len_to_capture guided_decoding_backend logits_all quantization_param_path",
}

#: answer -> settings of a call, where others have another word for it, or a thing of their own.
_REQUESTS: Mapping[str, str] = {
    "write max_new_tokens=20": "max_tokens n_predict num_predict max_completion_tokens "
    "max_output_tokens max_gen_len max_gen_length",
    "write min_new_tokens=5": "min_tokens",
    "write num_return_sequences=2 and temperature=1.0": "n best_of n_cmpl",
    "write eos_token_id=[] to go on": "ignore_eos",
    "they replace the model's own here, so add that; write eos_token_id=[0]": "stop_token_ids "
    "stop_ids",
    "write stop=['.']": "stop_sequences stop_words stopping_strings",
    "write json_schema={'type': 'object'}": "guided_json response_format structured_outputs "
    "guided_decoding response_schema format json_object",
    "write regex='[a-z]+'": "guided_regex structural_tag",
    "write choices=['yes', 'no']": "guided_choice",
    "write grammar='start: \"a\"'": "guided_grammar ebnf gbnf",
    "write sequence_bias=[[[5], 1.0]]": "logit_bias",
    "write bad_words_ids=[[5]]": "bad_words",
    "write prefix_allowed_tokens_fn=lambda number, ids: [5, 6]": "allowed_token_ids",
    "write logprobs=3": "n_probs top_logprobs top_n_tokens top_logprobs_num return_logprob",
    "write repetition_penalty=1.1": "repeat_penalty rep_pen",
    "write seed=1": "random_seed sampling_seed",
    "write do_sample=False": "greedy",
    "write temperature=0.7": "temp",
    "write deadline=30.0": "timeout",
    "jackfield.load(decoding='beam') has beams": "use_beam_search beam_width",
    "write its fields beside the prompt: engine.generate(prompt, temperature=0.7)": "sampling_"
    "params params options extra_body parameters",
    "for delta in engine.stream(…) hears a text as it grows": "stream",
    "write adapter='name', one of jackfield.load(adapters={'name': 'FOLDER'})": "lora_request",
    "a text ends before its stop text; drop it": "include_stop_str_in_output no_stop_trim",
    "a prompt that is too long is an error; shorten it": "truncate_prompt_tokens truncate",
    "prompts have no log-probabilities here; drop it": "prompt_logprobs decoder_input_details",
    "a Completion's text is what is new: write PROMPT + completion.text": "echo",
    "token ids are prompts as well: engine.generate([[5, 6, 7]])": "prompt_token_ids",
    "a Completion has a report, tokens and figures anyway; drop it": "details",
    "the context is the model's; drop it": "num_ctx n_ctx",
    "beginnings of prompts are found in the cache; cache_salt parts them": "cache_prompt",
    "write progress=True": "use_tqdm",
    "write a message of its own: [{'role': 'system', 'content': …}, …]": "system system_prompt",
    "a list of messages is a chat, and may hold images": "images messages",
    "a text is taken as it is, a list of messages is a chat; drop it": "raw template",
    "what a chat template reads, enable_thinking for instance, is an argument": "think",
    "a logits_processor of your own can do it": "mirostat mirostat_mode mirostat_tau mirostat_eta "
    "tfs_z tfs dynatemp_range dynatemp_exponent xtc_probability xtc_threshold dry_multiplier "
    "dry_base dry_allowed_length dry_penalty_last_n top_n_sigma top_a min_keep penalize_nl "
    "repeat_last_n last_n_tokens_size samplers watermark",
    _NONE: "suffix spaces_between_special_tokens thinking_token_budget detokenize",
}


#: kind -> what others call a backend, in small letters and with underscores -> ours.
NAMES: Mapping[str, Mapping[str, str]] = {
    "attention": {
        **dict.fromkeys(("flash_attn", "fa2"), "flash_attention_2"),
        **dict.fromkeys(("flashinfer", "flash_infer"), "flash_attention_2' or 'sdpa"),
        **dict.fromkeys(("paged", "paged_attn", "paged_attention", "pagedattention"), "paged|sdpa"),
        **dict.fromkeys(("xformers", "torch_sdpa", "torch_native"), "sdpa"),
    },
    "decoding": {
        "beam_search": "beam",
        "greedy": "sample",
        "ngram": "prompt_lookup",
        **dict.fromkeys(("deepseek_mtp", "nextn", "use_mtp"), "mtp"),
        **dict.fromkeys(
            ("draft_model", "eagle", "eagle3", "medusa", "speculative"),
            "assisted' or 'prompt_lookup",
        ),
    },
    "quantizer": {
        "awq": "int4-cpu' or 'bnb-4bit",
        **dict.fromkeys(
            ("q4_0", "q4_1", "q4_k", "q4_k_m", "q4_k_s", "q5_0", "q5_1", "q5_k", "q5_k_m"),
            "int4-cpu' or 'bnb-4bit",
        ),
        **dict.fromkeys(("q8_0", "q6_k"), "int8-cpu' or 'bnb-8bit"),
        "bnb": "bnb-4bit' or 'bnb-8bit",
        "eetq": "int8-cpu' or 'bnb-8bit",
        "fp8": "bnb-8bit' or 'torchao",
    },
    "scheduler": {"fcfs": "fifo"},
}


#: answer -> what others' modules have, in their spelling.
_MODULE: Mapping[str, str] = {
    "write jackfield.load(MODEL)": "LLM LLMEngine AsyncLLM AsyncLLMEngine Llama AutoModel "
    "AutoModelForCausalLM from_pretrained from_gguf pipeline TextGenerationPipeline Model Client",
    "settings are arguments of engine.generate, such as max_new_tokens=20": "SamplingParams "
    "GenerationConfig GenerateConfig",
    "write jackfield.load(MODEL).generate(PROMPT)": "generate chat complete completion",
    "run `jackfield serve MODEL`": "serve Server",
}

#: answer -> what others' engines have.
_ENGINE: Mapping[str, str] = {
    "write engine.generate([MESSAGES])": "chat create_chat_completion apply_chat_template",
    "write engine.generate(PROMPT)": "complete completion create_completion invoke predict "
    "generate_batch add_request",
    "write engine.stream(PROMPT), or astream": "generate_stream stream_generate streaming "
    "generate_async agenerate async_generate",
    "write engine.tokenizer": "tokenize detokenize encode decode get_tokenizer",
    "write engine.close()": "shutdown stop unload abort_all",
    "each call begins anew; drop it": "reset reset_prefix_cache",
    "write engine.cancel(REQUEST)": "abort abort_request",
    "write engine.report() for what ran, or engine.statistics()": "get_metrics metrics stats",
    "texts are made here, and no embeddings": "embed embeddings create_embedding score classify",
}


def our_name(kind: str, theirs: str) -> str | None:
    """What to write for a backend that others call so, however they spell it."""
    return NAMES.get(kind, {}).get(theirs.lower().replace("-", "_"))


def _by_name(answers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return ((name, answer) for answer, names in answers.items() for name in names.split())


#: How alike a name must be to one of ours to be taken for a misspelling of it.
ALIKE = 0.7

LOADING: Mapping[str, str] = dict(_by_name(_LOADING))
REQUESTS: Mapping[str, str] = dict(_by_name(_REQUESTS))
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "module 'jackfield'": dict(_by_name(_MODULE)),
    "'Engine' object": dict(_by_name(_ENGINE)),
}


def no_attribute(of: str, name: str) -> AttributeError:
    """That `of`, a key of `ATTRIBUTES`, has none of this name, and what to write instead."""
    answer = ATTRIBUTES[of].get(name)
    return AttributeError(f"{of} has no attribute {name!r}" + (f": {answer}" if answer else ""))
