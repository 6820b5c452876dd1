"""Which generation settings there are, sorted by what they ask for.

Every field of transformers' `GenerationConfig` and every argument of its `generate` stands in one
of these tables or among the settings that a decoding honours; `docs/departures.md` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Settings that transformers has no name for, or has as arguments of `generate`.
OWN = frozenset(
    {
        "adapter", "cache_salt", "choices", "deadline", "decoding", "frequency_penalty", "grammar",
        "json_schema", "language", "logits_processor", "logprobs", "negative_prompt",
        "prefix_allowed_tokens_fn", "presence_penalty", "priority", "regex", "seed",
        "skip_special_tokens", "stopping_criteria", "task",
    }
)  # fmt: skip

#: At which layer of the model drafts are made. A decoding has one number from the start, so a
#: request gets a decoding that has the very number, or is refused.
EARLY_EXIT = "assistant_early_exit"

#: That the model's own heads make the drafts. A request gets a decoding that has them.
USE_MTP = "use_mtp"

#: Honoured by the loop itself, whatever the decoding strategy.
LOOP = frozenset(
    {
        "adapter", "cache_salt", "choices", "deadline", "decoding", "eos_token_id", "grammar",
        "json_schema", "language", "max_length", "max_new_tokens", "num_return_sequences",
        "output_attentions", "output_hidden_states", "priority", "regex", "renormalize_logits",
        "skip_special_tokens", "stop_strings", "task",
    }
)  # fmt: skip

#: What Whisper is told of a sound.
OF_SPEECH = ("language", "task")

#: Other names of settings.
ALIASES: Mapping[str, str] = {
    "max_time": "deadline", "negative_prompt_ids": "negative_prompt", "stop": "stop_strings",
}  # fmt: skip

#: Fields that ask for nothing when they have one of these values.
INERT: Mapping[str, tuple[Any, ...]] = {
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "condition_on_prev_tokens": (False,),
    "diversity_penalty": (0.0,),
    "do_sample": (False,),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "is_assistant": (False,),
    "length_penalty": (1.0,),
    "low_memory": (False,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_logits": (False,),
    "output_scores": (False,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "repetition_penalty": (1.0,),
    "return_dict_in_generate": (False,),
    "return_segments": (False,),
    "return_timestamps": (False,),
    "return_token_timestamps": (False,),
    "skip_special_tokens": (True,),
    "target_lookbehind": (10,),
    "temperature": (1.0,),
    "token_healing": (False,),
    "top_k": (0,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "use_cache": (True,),
    "use_mtp": (False,),
}

#: What transformers takes for a field that nobody sets, where it is not the neutral value.
FILLED_IN: Mapping[str, Any] = {"top_k": 50}

#: What a text begins with where an encoder reads the prompt; to a decoder it is a fact.
START = "decoder_start_token_id"

#: Facts about the model, not wishes of a request.
FACTS = frozenset({"bos_token_id", START, "pad_token_id", "transformers_version"})

_CACHE = "jackfield.load(cache_implementation='plugin:…') has the cache"
_COMPILE = "jackfield.load(compile='plugin:…') compiles steps"

#: Choices of how things run, which belong to `load` and never to a model's files: what to do.
CODE: Mapping[str, str] = {
    "cache_config": f"{_CACHE}, and its options",
    "cache_implementation": _CACHE,
    "compile_config": _COMPILE,
    "continuous_batching_config": "jackfield.load(max_batch_size=…, max_batch_tokens=…) has bounds",
    "disable_compile": f"{_COMPILE}, and nothing else does",
    "max_cache_len": f"{_CACHE}, and its options",
    "prefill_chunk_size": "give it to jackfield.load, for all requests",
    "use_cache": "what jackfield.load makes always caches",
}

#: What a call returns beside its text: of a model's own config nobody asked for it.
RETURNED = frozenset(
    {
        "output_attentions", "output_hidden_states", "output_logits", "output_scores",
        "return_dict_in_generate",
    }
)  # fmt: skip

_ASSISTED = "jackfield.load(decoding='assisted', assistant_model=…) guesses with a small model"
_LOOKBEHIND = "with another tokenizer, guesses go by the whole text"

#: Fields that make a text faster and never another one. Where a model's file has them and the
#: decoding no use for them, nothing is lost.
DRAFTING: Mapping[str, str] = {
    "assistant_confidence_threshold": _ASSISTED,
    EARLY_EXIT: "jackfield.load(decoding='assisted?assistant_early_exit=N') drafts with N layers",
    "assistant_ensemble_weight": "guesses never change a text here",
    "assistant_lookbehind": _LOOKBEHIND,
    "is_assistant": _ASSISTED,
    "max_matching_ngram_size": "jackfield.load(decoding='prompt_lookup') looks up",
    "num_assistant_tokens": _ASSISTED,
    "num_assistant_tokens_schedule": _ASSISTED,
    "prompt_lookup_num_tokens": "jackfield.load(decoding='prompt_lookup') looks up",
    "speculation_type": "jackfield.load(decoding=…) says how tokens are guessed",
    "target_lookbehind": _LOOKBEHIND,
    USE_MTP: "jackfield.load(decoding='mtp') drafts with a model's own heads",
}


_MOVED = "transformers has moved it out of itself"

#: Fields that nothing here honours: what to do.
REFUSED: Mapping[str, str] = {
    **{name: DRAFTING[name] for name in (
        "assistant_ensemble_weight", "assistant_lookbehind", "is_assistant",
        "speculation_type", "target_lookbehind")},
    "constraints": f"{_MOVED}; json_schema, regex, grammar and choices confine a text",
    "dola_layers": _MOVED,
    "force_words_ids": f"{_MOVED}; json_schema, regex, grammar and choices confine a text",
    "low_memory": _MOVED,
    "penalty_alpha": _MOVED,
    "return_dict_in_generate": "a Completion has text, tokens and log-probabilities anyway",
    "token_healing": "transformers first generates one token more; end the prompt where one does",
}  # fmt: skip

#: Arguments of `generate` that are no settings: what to do.
ARGUMENTS: Mapping[str, str] = {
    "assistant_model": _ASSISTED,
    "assistant_tokenizer": "jackfield.load(assistant={'tokenizer': …}) takes it",
    "attention_mask": "it stands beside input_ids, or features, for all rows of the call",
    **dict.fromkeys(
        ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"),
        "a sound is read once, at one temperature; ask again with another one",
    ),
    **dict.fromkeys(
        ("condition_on_prev_tokens", "prompt_condition_type", "prompt_ids"),
        "give decoder_input_ids with the features: all tokens that the text begins with",
    ),
    "custom_generate": "jackfield.load(decoding='plugin:…') chooses how tokens are found",
    **dict.fromkeys(
        ("decoder_input_ids", "input_features", "input_values", "pixel_values"),
        "it is a part of a prompt that is features",
    ),
    "force_unique_generate_call": "a sound of one window is read by one call; drop it",
    "is_multilingual": "it stands in the model's generation config",
    "monitor_progress": "a sound has one window; a stream shows the text as it comes",
    "input_ids": "it stands beside attention_mask, for all rows of the call",
    "inputs": "it is the prompts of the whole call",
    "inputs_embeds": "prompts are texts, token ids or chat messages",
    "negative_prompt_attention_mask": "a negative_prompt has no padding; give its own tokens",
    "past_key_values": "the engine has a cache, which finds prompts that begin alike",
    "position_ids": "positions are those of the tokens in their prompt",
    **dict.fromkeys(
        ("return_segments", "return_timestamps", "return_token_timestamps", "time_precision",
         "time_precision_features"),
        "timestamps are not built here; a sound of up to one window (30 s) has a text without them",
    ),
    "streamer": "generate takes one for one prompt; stream and submit can be iterated over",
    "synced_gpus": "an engine runs in one process",
    "tokenizer": "jackfield.load(tokenizer=…) takes it",
    "trust_remote_code": "code from a model's repository is never run",
}  # fmt: skip


def unhonoured(name: str) -> str | None:
    """What to do instead of a setting that no request has; None: some do."""
    return CODE.get(name) or ARGUMENTS.get(name) or REFUSED.get(name)


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether `value` is a neutral one of its field."""
    return any(_same(value, inert) for inert in INERT.get(name, ()))


def _same(value: Any, inert: Any) -> bool:
    if isinstance(inert, bool | str):
        return type(value) is type(inert) and bool(value == inert)
    kinds = (int, float) if isinstance(inert, float) else (int,)
    return isinstance(value, kinds) and not isinstance(value, bool) and value == inert
