"""Generation settings: transformers' `GenerationConfig` fields, each one honoured or refused.

Beside those fields there are some that transformers has no name for: `seed`, `logprobs`,
`presence_penalty`, `frequency_penalty`, what structures a text (`json_schema`, `regex`, `grammar`,
`choices`), and, for a request among others, `decoding`, `priority`,
`deadline` and `cache_salt`. `logits_processor`, `stopping_criteria` and `prefix_allowed_tokens_fn`
are what `generate` takes under these names; `stop` is short for `stop_strings`, and `max_time` is
`deadline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jackfield.contracts.settings import Settings
from jackfield.errors import SettingsError
from jackfield.requests import beam_settings, drawing, lengths, structures, token_settings
from jackfield.requests.checked_numbers import CheckedNumbers
from jackfield.requests.draft_settings import read
from jackfield.requests.honouring import Limits, refuse_unhonoured
from jackfield.requests.wishes import Wishes

MOST_SEQUENCES = 10_000  # of one request, as each of them takes memory before it runs


def resolve(wishes: Wishes, prompt_length: int, limits: Limits, number: int = 0) -> Settings:
    """The settings of one request, for prompt `number` of its call.

    Raises SettingsError for a field that is unknown, invalid or not honoured, PromptError where
    the prompt and the new tokens do not fit into the context.
    """
    refuse_unhonoured(wishes, limits)
    given = wishes.given
    count = CheckedNumbers(given)
    drawn = drawing.drawing(wishes, limits.honoured)
    eos = token_settings.token_ids(
        given.get("eos_token_id"), f"eos_token_id{_origin(wishes)}", limits.vocab_size
    )
    settings = Settings(
        max_new_tokens=lengths.max_new_tokens(wishes, prompt_length, limits),
        min_new_tokens=lengths.min_new_tokens(wishes, prompt_length),
        **drawn,
        **_penalties(count),
        sequence_bias=MappingProxyType(token_settings.biases(given, eos, limits.vocab_size)),
        eos_token_ids=eos,
        stop_strings=token_settings.stop_strings(given.get("stop_strings"), limits),
        logprobs=count.integer("logprobs", 0, at_least=0, at_most=limits.vocab_size)
        if "logprobs" in given
        else None,
        logits_processor=token_settings.processors(given, number),
        stopping_criteria=token_settings.functions(given, "stopping_criteria"),
        num_return_sequences=count.integer(
            "num_return_sequences", 1, at_least=1, at_most=MOST_SEQUENCES
        ),
        **_among_others(given, count),
        decoding=limits.decoding,
        drafts=read(given, limits.honoured, count),
        beams=beam_settings.read(given, limits.honoured, count),
        structure=structures.read(given, has_tokenizer=limits.has_tokenizer),
        seed=drawing.seed(wishes, draws=drawn["do_sample"]),
    )
    lengths.check_both(wishes, settings.min_new_tokens, settings.max_new_tokens)
    _check_together(settings, limits)
    return settings


def _origin(wishes: Wishes) -> str:
    of_model = wishes.of_the_model("eos_token_id")
    return " (from the model's generation_config)" if of_model else ""


def _penalties(number: CheckedNumbers) -> dict[str, Any]:
    return {
        "repetition_penalty": number.real("repetition_penalty", 1.0, above=0),
        "presence_penalty": number.real("presence_penalty", 0.0),
        "frequency_penalty": number.real("frequency_penalty", 0.0),
    }


def _among_others(given: Mapping[str, Any], number: CheckedNumbers) -> dict[str, Any]:
    """How a request stands to those that run beside it."""
    return {
        "priority": number.integer("priority", 0),
        "deadline": number.real("deadline", 0.0, above=0) if "deadline" in given else None,
        "cache_salt": token_settings.salt(given.get("cache_salt", "")),
    }


def _check_together(settings: Settings, limits: Limits) -> None:
    """Raise SettingsError where settings that are right by themselves contradict each other."""
    beam_settings.check_penalty(settings.beams, settings.max_new_tokens)
    searched = "num_beams" in limits.honoured
    if settings.num_return_sequences > 1 and not (settings.do_sample or searched):
        raise SettingsError(
            f"num_return_sequences={settings.num_return_sequences} without sampling would be the "
            "same text again and again; set do_sample=True or temperature, or num_beams"
        )
