"""Generation settings: transformers' `GenerationConfig` fields, each one honoured or refused.

Beside those fields there are some that transformers has no name for: `seed`, `logprobs`,
`presence_penalty`, `frequency_penalty`, `negative_prompt`, what structures a text (`json_schema`,
`regex`, `grammar`, `choices`), and, for a request among others, `adapter`, `decoding`, `priority`,
`deadline` and `cache_salt`.
`skip_special_tokens` is what `decode` of a tokenizer takes; `logits_processor`, `stopping_criteria`
and `prefix_allowed_tokens_fn` are what `generate` takes under these names; `stop` is short for
`stop_strings`, and `max_time` is `deadline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jackfield.contracts.settings import Settings
from jackfield.errors import PromptError, SettingsError, quoted
from jackfield.requests import (
    decoding_settings,
    field_processors,
    structures,
    token_settings,
)
from jackfield.requests.checked_numbers import CheckedNumbers
from jackfield.requests.field_processors import LATE, FieldProcessor
from jackfield.requests.honouring import Limits, refuse_unhonoured
from jackfield.requests.vocabulary import asks_for_nothing
from jackfield.requests.watermarking import watermark
from jackfield.requests.wishes import Wishes

DEFAULT_MAX_NEW_TOKENS = 256
MOST_SEQUENCES = 10_000  # of one request, as each of them takes memory before it runs
_KNOBS = (
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip


def resolve(
    wishes: Wishes,
    prompt_length: int,
    limits: Limits,
    number: int = 0,
    encoder_ids: Sequence[int] | None = None,
) -> Settings:
    """The settings of one request, for prompt `number` of its call.

    Where an encoder reads `encoder_ids`, `prompt_length` is what the decoder begins with.

    Raises SettingsError for a field that is unknown, invalid or not honoured, PromptError where
    the prompt and the new tokens do not fit into the context.
    """
    refuse_unhonoured(wishes, limits)
    try:
        return _resolved(wishes, prompt_length, limits, number, encoder_ids)
    except SettingsError as error:
        raise SettingsError(wishes.told(str(error))) from None


def _resolved(
    wishes: Wishes,
    prompt_length: int,
    limits: Limits,
    number: int,
    encoder_ids: Sequence[int] | None,
) -> Settings:
    given = wishes.given
    count = CheckedNumbers(given, wishes.origin)
    drawn = _drawing(wishes, limits.honoured)
    eos = token_settings.token_ids(given.get("eos_token_id"), "eos_token_id", limits.vocab_size)
    new = _max_new_tokens(wishes, prompt_length, limits)
    fields = field_processors.by_fields(
        wishes, (prompt_length, new), eos, limits.vocab_size, encoder_ids
    )
    settings = Settings(
        max_new_tokens=new,
        min_new_tokens=_min_new_tokens(wishes, prompt_length),
        **drawn,
        **_penalties(count),
        sequence_bias=MappingProxyType(token_settings.biases(given, eos, limits.vocab_size)),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        stop_strings=token_settings.stop_strings(given.get("stop_strings"), limits),
        logprobs=count.integer("logprobs", 0, at_least=0, at_most=limits.vocab_size)
        if "logprobs" in given
        else None,
        output_logits=_flag(given, "output_logits"),
        output_scores=_flag(given, "output_scores"),
        output_hidden_states=_flag(given, "output_hidden_states"),
        output_attentions=_flag(given, "output_attentions"),
        logits_processor=_processors(fields, given, number),
        guidance_scale=_guidance(given, count),
        watermark=watermark(wishes, prompt_length, limits.vocab_size),
        stopping_criteria=token_settings.functions(given, "stopping_criteria"),
        num_return_sequences=count.integer(
            "num_return_sequences", 1, at_least=1, at_most=MOST_SEQUENCES
        ),
        **_among_others(given, count),
        decoding=limits.decoding,
        drafts=decoding_settings.drafts(given, limits.honoured, count),
        beams=decoding_settings.beams(given, limits.honoured, count),
        structure=structures.read(given, has_tokenizer=limits.has_tokenizer),
        skip_special_tokens=_skips_special(given, limits),
        renormalize_logits=_flag(given, "renormalize_logits"),
        seed=_seed(wishes, draws=drawn["do_sample"]),
    )
    _check_lengths(wishes, settings.min_new_tokens, settings.max_new_tokens)
    _check_together(settings, limits)
    return settings


def _drawing(wishes: Wishes, honoured: frozenset[str]) -> dict[str, Any]:
    """The fields of `Settings` that say how tokens are drawn; neutral ones for a greedy request."""
    if not _draws(wishes, honoured):
        _knobs(CheckedNumbers(wishes.keywords))  # wrong ones are refused all the same
        return {"do_sample": False}
    return {"do_sample": True, **_knobs(CheckedNumbers(wishes.given, wishes.origin))}


def _knobs(number: CheckedNumbers) -> dict[str, Any]:
    return {
        "temperature": number.real("temperature", 1.0, at_least=0),
        "top_k": number.integer("top_k", 0, at_least=0),
        "top_p": number.real("top_p", 1.0, above=0, at_most=1),
        "min_p": number.real("min_p", 0.0, at_least=0, at_most=1),
        "top_h": number.real("top_h", 0.0, above=0, at_most=1) if "top_h" in number.fields else 0.0,
        "typical_p": number.real("typical_p", 1.0, above=0, at_most=1),
        "epsilon_cutoff": number.real("epsilon_cutoff", 0.0, at_least=0, below=1),
        "eta_cutoff": number.real("eta_cutoff", 0.0, at_least=0, below=1),
    }


def _draws(wishes: Wishes, honoured: frozenset[str]) -> bool:
    """By keywords, tokens are drawn where any of the knobs asks for it; else as a config says."""
    keywords, config = wishes.keywords, wishes.config
    for layer, name in ((keywords, ""), (config, wishes.origin("do_sample"))):
        if not isinstance(layer.get("do_sample", False), bool):
            raise SettingsError(
                f"do_sample must be True or False, not {quoted(layer['do_sample'])}{name}"
            )
    if "do_sample" not in honoured:
        return False
    explicit = keywords.get("do_sample")
    knobs = [k for k in _KNOBS if k in keywords and not asks_for_nothing(k, keywords[k])]
    cold = CheckedNumbers(wishes.given, wishes.origin).real("temperature", 1.0, at_least=0) == 0
    if explicit is False and knobs and not cold:
        raise SettingsError(
            f"{knobs[0]}={quoted(keywords[knobs[0]])} has no effect with do_sample=False; drop one "
            "of them"
        )
    asked = explicit or (config.get("do_sample") and not wishes.of_the_model("do_sample"))
    if cold and asked and ("temperature" not in keywords or explicit):
        raise SettingsError("temperature=0 is greedy, do_sample=True is not; drop one of the two")
    if cold or explicit is not None:
        return bool(explicit) and not cold
    return bool(knobs) or "temperature" in keywords or bool(config.get("do_sample"))


def _max_new_tokens(wishes: Wishes, prompt_length: int, limits: Limits) -> int:
    """What a caller asked must fit into the context; any default is cut to what is left of it."""
    context, shown = limits.context_length, limits.image_tokens
    told = f"{prompt_length} tokens" + (f" ({shown} of them of its images)" if shown else "")
    room = math.inf if context is None else context - prompt_length
    if room < 1:
        raise PromptError(
            f"the prompt has {told}, the model's context is {context}: shorten the "
            f"prompt to at most {(context or 1) - 1} tokens"
        )
    for layer in (wishes.keywords, wishes.config):
        if name := _length_in(layer):
            wanted = _wanted(layer, name, wishes.origin(name), prompt_length)
            if wanted > room and not wishes.of_the_model(name):
                most = room if name == "max_new_tokens" else context
                raise PromptError(
                    f"a prompt of {told} and {name}={quoted(layer[name])} do not "
                    f"fit into the model's context of {context}; lower {name} to {most}"
                )
            return int(min(wanted, room))
    return int(min(DEFAULT_MAX_NEW_TOKENS, room))


def _length_in(layer: Mapping[str, Any]) -> str:
    return next((name for name in ("max_new_tokens", "max_length") if name in layer), "")


def _wanted(layer: Mapping[str, Any], name: str, origin: str, prompt_length: int) -> int:
    value = CheckedNumbers(layer, lambda _: origin).integer(name, 0, at_least=1)
    if name == "max_new_tokens":
        return value
    if value <= prompt_length:
        raise SettingsError(
            f"max_length={value}{origin and f'{origin},'} leaves no new token after a prompt of "
            f"{prompt_length} tokens; raise it, or set max_new_tokens"
        )
    return value - prompt_length


def _min_new_tokens(wishes: Wishes, prompt_length: int) -> int:
    """Of `min_new_tokens` and `min_length`, which counts the prompt, the former decides."""
    found = 0
    for layer in (wishes.config, wishes.keywords):
        number = CheckedNumbers(layer, wishes.origin)
        if "min_length" in layer:
            found = max(0, number.integer("min_length", 0, at_least=0) - prompt_length)
        if "min_new_tokens" in layer:
            found = number.integer("min_new_tokens", 0, at_least=0)
    return found


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
        "adapter": token_settings.adapter(given.get("adapter")),
    }


def _processors(
    fields: Sequence[FieldProcessor], given: Mapping[str, Any], number: int
) -> tuple[Callable[..., Any], ...]:
    """All of a request, in the order of transformers."""
    return (
        *(one for one in fields if one.name not in LATE),
        *token_settings.allowed_by_prefix(given, number),
        *(one for one in fields if one.name in LATE),
        *token_settings.functions(given, "logits_processor"),
    )


def _guidance(given: Mapping[str, Any], number: CheckedNumbers) -> float:
    scale = number.real("guidance_scale", 1.0)
    if scale == 1 and "negative_prompt" in given:
        raise SettingsError(
            "negative_prompt (or negative_prompt_ids) is what guidance_scale leads away from, and "
            "that is 1; set it to more than 1, e.g. 1.5, or drop negative_prompt"
        )
    return scale


def _flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    if not isinstance(value := given.get(name, default), bool):
        raise SettingsError(f"{name} must be True or False, not {quoted(value)}")
    return value


def _skips_special(given: Mapping[str, Any], limits: Limits) -> bool:
    value = _flag(given, "skip_special_tokens", default=True)
    if not value and not limits.has_tokenizer:
        raise SettingsError(
            "skip_special_tokens is about text, and this model has no tokenizer; token_ids has all"
        )
    return value


def _seed(wishes: Wishes, *, draws: bool) -> int:
    """The caller's, or one that is drawn from torch's default generator, if it is needed.

    So `torch.manual_seed` and transformers' `set_seed` decide, in the order of requests.
    """
    asked = CheckedNumbers(wishes.given, wishes.origin).integer("seed", 0, at_least=0)
    if "seed" in wishes.given or not draws:
        return asked
    import torch

    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(
        generator=torch.default_generator
    )
    return int(drawn)


def _check_lengths(wishes: Wishes, least: int, most: int) -> None:
    """Raise SettingsError where more new tokens are asked for at least than at most."""
    if least > most:
        asked = f"min_new_tokens={quoted(least)}"
        if "min_new_tokens" not in wishes.given:
            asked = f"min_length, which leaves {asked},"
        raise SettingsError(
            f"{asked} is more than max_new_tokens={quoted(most)}; lower the one or raise the other"
        )


def _check_together(settings: Settings, limits: Limits) -> None:
    """Raise SettingsError where settings that are right by themselves contradict each other."""
    decoding_settings.check_penalty(settings.beams, settings.max_new_tokens)
    searched = "num_beams" in limits.honoured
    if settings.num_return_sequences > 1 and not (settings.do_sample or searched):
        raise SettingsError(
            f"num_return_sequences={settings.num_return_sequences} without sampling would be the "
            "same text again and again; set do_sample=True or temperature, or num_beams"
        )
