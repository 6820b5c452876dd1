"""Generation settings with values that change a text, to be asked of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.contracts.decoding import BEAM_SETTINGS, DRAFT_SETTINGS, SAMPLER_SETTINGS
from jackfield.testing.models import VOCAB

SEEDS = (11, 12, 13)
#: EOS tokens that random texts do come to.
ENDS = list(range(0, VOCAB, 7))


class Even:
    """A logits processor: no odd tokens, and a token costs what its place is worth."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, 1::2] = -float("inf")
        return scores


def at_least(length: int) -> Any:
    """A stopping criterion: from so many tokens on, where the last is even."""

    def met(input_ids: Any, scores: Any, **_: Any) -> bool:
        return input_ids.shape[1] >= length and int(input_ids[0, -1]) % 2 == 0

    return met


def few(batch: int, input_ids: Any) -> list[int]:
    """For prefix_allowed_tokens_fn: which tokens may follow the last one."""
    last = int(input_ids[-1])
    return [(last * step + 3) % VOCAB for step in (1, 2, 5, 7)]


#: setting -> what a request says to have it honoured
VALUES: Mapping[str, dict[str, Any]] = {
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(0, VOCAB, 2)] + [[3, 5]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, VOCAB, 2))},
    "do_sample": {"do_sample": True},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.02},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.1},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 1.5), "eos_token_id": ENDS,
    },
    "forced_bos_token_id": {"forced_bos_token_id": 3},
    "forced_eos_token_id": {"forced_eos_token_id": 3},
    "frequency_penalty": {"frequency_penalty": 3.0},
    "guidance_scale": {"guidance_scale": 4.0},
    "logits_processor": {"logits_processor": [Even()]},
    "logprobs": {"logprobs": 2},
    "min_length": {"min_length": 10, "eos_token_id": ENDS},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": ENDS},
    "min_p": {"do_sample": True, "min_p": 0.2},
    "negative_prompt": {"guidance_scale": 4.0, "negative_prompt": [3, 5, 9]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "output_logits": {"output_logits": True},
    "output_scores": {"output_scores": True, "do_sample": True, "top_k": 9},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": few},
    "presence_penalty": {"presence_penalty": 4.0},
    "remove_invalid_values": {"remove_invalid_values": True},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "seed": {"do_sample": True, "temperature": 2.0},
    "sequence_bias": {"sequence_bias": {(n,): 5.0 for n in range(20)} | {(3, 5): 9.0}},
    "stopping_criteria": {"stopping_criteria": [at_least(8)]},
    "suppress_tokens": {"suppress_tokens": list(range(40))},
    "temperature": {"do_sample": True, "temperature": 1.6},
    "top_h": {"do_sample": True, "top_h": 0.4},
    "top_k": {"do_sample": True, "top_k": 4},
    "top_p": {"do_sample": True, "top_p": 0.6},
    "typical_p": {"do_sample": True, "typical_p": 0.4},
    "watermarking_config": {"watermarking_config": {"bias": 9.0}},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
    "max_matching_ngram_size": {"max_matching_ngram_size": 1},
    "num_assistant_tokens": {"num_assistant_tokens": 2},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2},
    "diversity_penalty": {"diversity_penalty": 0.7, "num_beam_groups": 2, "num_beams": 4},
    "early_stopping": {"early_stopping": True, "num_beams": 3, "eos_token_id": ENDS},
    "length_penalty": {"length_penalty": -1.0, "num_beams": 3, "eos_token_id": ENDS},
    "num_beam_groups": {"diversity_penalty": 0.7, "num_beam_groups": 2, "num_beams": 4},
    "num_beams": {"num_beams": 3},
}  # fmt: skip

#: Those that no strategy of another shape can honour, and so ask for nothing else.
EVERY = SAMPLER_SETTINGS | DRAFT_SETTINGS | BEAM_SETTINGS


def asked(name: str, declared: frozenset[str], number: int) -> dict[str, Any] | None:
    """What request `number` says to have a setting honoured; None: other settings are missing."""
    wanted = dict(VALUES[name])
    if wanted.keys() & EVERY - declared:
        return None
    if wanted.get("do_sample") and "seed" in declared:
        wanted["seed"] = SEEDS[number % len(SEEDS)]
    return wanted
