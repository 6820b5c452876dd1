"""Which generation settings there are, sorted by what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Settings that transformers has no name for.
OWN = frozenset(
    {
        "cache_salt", "choices", "deadline", "decoding", "frequency_penalty", "grammar",
        "json_schema", "logits_processor", "logprobs", "presence_penalty", "priority", "regex",
        "seed",
    }
)  # fmt: skip

#: Honoured by the loop itself, whatever the decoding strategy.
LOOP = frozenset(
    {
        "cache_salt", "choices", "deadline", "decoding", "eos_token_id", "grammar", "json_schema",
        "max_length", "max_new_tokens", "num_return_sequences", "priority", "regex",
        "stop_strings",
    }
)  # fmt: skip

#: Fields that ask for nothing when they have one of these values.
INERT: Mapping[str, tuple[Any, ...]] = {
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
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
    "target_lookbehind": (10,),
    "temperature": (1.0,),
    "token_healing": (False,),
    "top_k": (0,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "use_cache": (True,),
    "use_mtp": (False,),
}

#: Facts about the model, not wishes of a request.
FACTS = frozenset(
    {
        "bos_token_id", "decoder_start_token_id", "pad_token_id",
        "transformers_version",
    }
)  # fmt: skip

#: Choices of how things run, which belong to `load` and never to a model's files.
CODE = frozenset(
    {
        "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
        "disable_compile", "use_cache",
    }
)  # fmt: skip
