"""Generation settings: transformers' `GenerationConfig` fields, each one honoured or refused.

Beside those fields there are some that transformers has no name for: `seed`, `logprobs`,
`presence_penalty`, `frequency_penalty`, what structures a text (`json_schema`, `regex`, `grammar`,
`choices`), and, for a request among others, `decoding`, `priority`,
`deadline` and `cache_salt`. `logits_processor` is what `generate` takes under that name; `stop` is
short for `stop_strings`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from jackfield.asking import beam_settings
from jackfield.asking.beam_settings import BeamSettings
from jackfield.asking.checked_numbers import LARGEST, CheckedNumbers
from jackfield.asking.draft_settings import DraftSettings, read
from jackfield.asking.vocabulary import CODE, FACTS, INERT, LOOP, OWN
from jackfield.choosing.selection import nearest
from jackfield.errors import PromptError, SettingsError
from jackfield.tokens import structured
from jackfield.tokens.structured import Structure

_VOCABULARY = frozenset(k for k in vars(GenerationConfig()) if not k.startswith("_"))
_LISTS = (list, tuple)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One request's settings, checked and resolved. Biases come before anything else.

    `sequence_bias` maps token-id tuples to what is added to the last one's logit when the others
    precede it; bad words and suppressed tokens are in it with -inf. `logits_processor` are
    functions of (token ids `[1, length]`, scores `[1, vocab]`), called after the penalties.
    A higher `priority` goes first; `deadline` is in seconds from submission; only requests with an
    equal `cache_salt` share cached prefixes. `decoding` names one of the engine's strategies,
    `drafts` and `beams` are what it is asked for. `structure` says what the text must look like.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    sequence_bias: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    logits_processor: tuple[Callable[..., Any], ...] = ()
    num_return_sequences: int = 1
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    decoding: str = ""
    drafts: DraftSettings = field(default_factory=DraftSettings)
    beams: BeamSettings = field(default_factory=BeamSettings)
    structure: Structure | None = None


@dataclass(frozen=True)
class Limits:
    """What settings are checked against: the model's vocabulary and context, and the strategy.

    `elsewhere` says for a setting that the strategy does not honour which one does ("": none).
    """

    vocab_size: int
    context_length: int | None
    honoured: frozenset[str]
    decoding: str
    has_tokenizer: bool
    elsewhere: Callable[[str], str] = lambda _: ""


def resolve(
    defaults: GenerationConfig, asked: Mapping[str, Any], prompt_length: int, limits: Limits
) -> Settings:
    """The settings of one request: `asked` by the caller, over the model's own `defaults`.

    Raises SettingsError for a field that is unknown, invalid or not honoured, PromptError where
    the prompt and the new tokens do not fit into the context.
    """
    asked = normalized(asked)
    model = _of_the_model(defaults, limits)
    _refuse_unhonoured(asked, limits, "")
    _refuse_unhonoured({k: v for k, v in model.items() if k not in asked}, limits,
                       ", which the model's generation_config.json sets")  # fmt: skip
    given = {**model, **asked}
    number = CheckedNumbers(given)
    sampling = _sampling(asked, model, number)
    eos = _ids(given.get("eos_token_id"), _named("eos_token_id", asked), limits.vocab_size)
    settings = Settings(
        max_new_tokens=_max_new_tokens(asked, model, prompt_length, limits),
        min_new_tokens=_min_new_tokens(number, prompt_length),
        **sampling,
        **_penalties(number),
        sequence_bias=_biases(given, eos, limits.vocab_size),
        eos_token_ids=eos,
        stop_strings=_stop_strings(given.get("stop_strings"), limits),
        seed=number.integer("seed", secrets.randbits(63)),
        logprobs=number.integer("logprobs", 0, at_least=0, at_most=limits.vocab_size)
        if "logprobs" in given
        else None,
        logits_processor=_processors(given.get("logits_processor")),
        num_return_sequences=number.integer("num_return_sequences", 1, at_least=1),
        **_among_others(given, number),
        decoding=limits.decoding,
        drafts=read(given, limits.honoured, number),
        beams=beam_settings.read(given, limits.honoured, number),
        structure=structured.read(given, has_tokenizer=limits.has_tokenizer),
    )
    _check_together(settings, limits)
    return settings


def normalized(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `generation_config=` and `stop=` into plain fields; None means "not asked"."""
    fields = {key: value for key, value in asked.items() if value is not None}
    if (config := fields.pop("generation_config", None)) is not None:
        if not isinstance(config, GenerationConfig):
            raise SettingsError(f"generation_config must be a GenerationConfig, not {config!r}")
        own = {k: v for k, v in vars(config).items() if not k.startswith("_") and k not in FACTS}
        fields = {**{k: v for k, v in own.items() if v is not None}, **fields}
    if "stop" in fields:
        if "stop_strings" in fields:
            raise SettingsError("stop and stop_strings are the same setting; give one of them")
        fields["stop_strings"] = fields.pop("stop")
    return fields


def _fields(config: GenerationConfig) -> dict[str, Any]:
    """What a model's `config` asks for: no facts about it, no fields unknown to transformers."""
    found = {k: getattr(config, k, None) for k in _VOCABULARY - FACTS}
    return {k: v for k, v in found.items() if v is not None}


def _refuse_unhonoured(fields: Mapping[str, Any], limits: Limits, origin: str) -> None:
    vocabulary = _VOCABULARY | OWN
    honoured = LOOP | limits.honoured
    for key, value in fields.items():
        if key in honoured or key in FACTS or any(_same(value, v) for v in INERT.get(key, ())):
            continue
        if key not in vocabulary:
            raise SettingsError(
                f"there is no setting {key!r}{nearest(key, honoured)} (settings are the fields of "
                f"transformers' GenerationConfig, and {', '.join(sorted(OWN))})"
            )
        if key in CODE:
            raise SettingsError(f"{key} is not a setting of a request; give it to jackfield.load")
        hint = f"; override it with {key}={INERT[key][0]}" if origin and key in INERT else ""
        raise SettingsError(
            f"the decoding {limits.decoding!r} does not honour {key}={value!r}{origin}; it is "
            f"never ignored{hint or ', so drop it'} or choose a decoding that does"
            f"{limits.elsewhere(key)}"
        )


def _of_the_model(defaults: GenerationConfig, limits: Limits) -> dict[str, Any]:
    """What the model's own `defaults` ask for, and the strategy has a use for."""
    model = {k: v for k, v in _fields(defaults).items() if k not in CODE}
    if "do_sample" not in limits.honoured:  # whose own refusal is enough
        model = {k: v for k, v in model.items() if k not in _SAMPLING}
    return model


def _same(value: Any, inert: Any) -> bool:
    plain = isinstance(value, bool | int | float | str)
    return plain and value == inert and isinstance(value, bool) == isinstance(inert, bool)


def _sampling(
    asked: Mapping[str, Any], model: Mapping[str, Any], number: CheckedNumbers
) -> dict[str, Any]:
    """Whether tokens are drawn, and from which."""
    temperature = number.real("temperature", 1.0, at_least=0)
    do_sample = _do_sample(asked, model, temperature)
    return {
        "do_sample": do_sample,
        "temperature": temperature if do_sample else 1.0,
        "top_k": number.integer("top_k", 0, at_least=0),
        "top_p": number.real("top_p", 1.0, above=0, at_most=1),
        "min_p": number.real("min_p", 0.0, at_least=0, at_most=1),
    }


def _do_sample(asked: Mapping[str, Any], model: Mapping[str, Any], temperature: float) -> bool:
    """Sampling is on when it is asked for, by `do_sample` or by any of its knobs."""
    knobs = [
        k for k in _SAMPLING if k in asked and not any(_same(asked[k], v) for v in INERT.get(k, ()))
    ]
    greedy = temperature == 0
    explicit = asked.get("do_sample")
    if explicit is not None and not isinstance(explicit, bool):
        raise SettingsError(f"do_sample must be True or False, not {explicit!r}")
    if explicit is False and knobs and not greedy:
        raise SettingsError(
            f"{knobs[0]}={asked[knobs[0]]!r} has no effect with do_sample=False; drop one of them"
        )
    if explicit is True and greedy:
        raise SettingsError("temperature=0 is greedy, do_sample=True is not; drop one of the two")
    if greedy:
        return False
    if explicit is not None:
        return explicit
    return bool(knobs) or "temperature" in asked or bool(model.get("do_sample"))


def _max_new_tokens(
    asked: Mapping[str, Any], model: Mapping[str, Any], prompt_length: int, limits: Limits
) -> int:
    """What was asked must fit into the context; a default is cut to what is left of it."""
    context = limits.context_length
    room = math.inf if context is None else context - prompt_length
    if room < 1:
        raise PromptError(
            f"the prompt has {prompt_length} tokens, the model's context is {context}: shorten the "
            f"prompt to at most {(context or 1) - 1} tokens"
        )
    for origin in (asked, model):
        number = CheckedNumbers(origin)
        if "max_new_tokens" in origin:
            wanted = number.integer("max_new_tokens", 0, at_least=1)
        elif "max_length" in origin:
            wanted = number.integer("max_length", 0, at_least=1) - prompt_length
            if wanted < 1 and origin is asked:
                raise SettingsError(
                    f"max_length={origin['max_length']} leaves no new token after a prompt of "
                    f"{prompt_length} tokens; raise it, or set max_new_tokens"
                )
        else:
            continue
        if wanted > room and origin is asked:
            raise PromptError(
                f"a prompt of {prompt_length} tokens and max_new_tokens={wanted} do not fit into "
                f"the model's context of {context}; lower max_new_tokens to {room}"
            )
        return int(max(1, min(wanted, room)))
    return int(min(DEFAULT_MAX_NEW_TOKENS, room))


def _min_new_tokens(number: CheckedNumbers, prompt_length: int) -> int:
    """The larger of `min_new_tokens` and what `min_length`, which counts the prompt, leaves."""
    return max(
        number.integer("min_new_tokens", 0, at_least=0),
        number.integer("min_length", 0, at_least=0) - prompt_length,
    )


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
        "cache_salt": _salt(given.get("cache_salt", "")),
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
    if settings.min_new_tokens > settings.max_new_tokens:
        raise SettingsError(
            f"min_new_tokens={settings.min_new_tokens} is more than "
            f"max_new_tokens={settings.max_new_tokens}; lower the one or raise the other"
        )


def _named(name: str, asked: Mapping[str, Any]) -> str:
    """`name`, with its origin where it is not the caller who gave it."""
    return name if name in asked else f"{name} (from the model's generation_config.json)"


def _ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids from an int, a list of ints, or nothing."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise SettingsError(
                f"{name} holds {token!r}, which is no token id (0 to {vocab_size - 1})"
            )
    return ids


def _biases(
    given: Mapping[str, Any], eos: tuple[int, ...], vocab_size: int
) -> dict[tuple[int, ...], float]:
    """`sequence_bias`, `bad_words_ids` and `suppress_tokens` as one mapping."""
    found: dict[tuple[int, ...], float] = {}
    for key, value in _pairs(given.get("sequence_bias", ())):
        ids = _ids(key, "sequence_bias", vocab_size)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and (abs(value) <= LARGEST or value == -math.inf)):
            raise SettingsError(
                f"sequence_bias for {list(ids)} must be a finite number or -inf, not {value!r}"
            )
        if not ids:
            raise SettingsError("sequence_bias has an entry without a token id; drop it")
        found[ids] = float(value)
    words = given.get("bad_words_ids", ())
    if not (isinstance(words, _LISTS) and all(isinstance(w, _LISTS) and w for w in words)):
        raise SettingsError(f"bad_words_ids must be lists of token ids, none empty, not {words!r}")
    for word in words:
        ids = _ids(word, "bad_words_ids", vocab_size)
        if not (len(ids) == 1 and ids[0] in eos):  # as in transformers, EOS is no bad word
            found[ids] = -math.inf
    for token in _ids(given.get("suppress_tokens"), "suppress_tokens", vocab_size):
        found[(token,)] = -math.inf
    return found


def _pairs(bias: Any) -> Sequence[tuple[Any, Any]]:
    """The (token ids, number) pairs of a `sequence_bias`, which is a mapping or a list of pairs."""
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, _LISTS) or not all(
        isinstance(p, _LISTS) and len(p) == 2 for p in pairs
    ):
        raise SettingsError(f"sequence_bias must be like {{(5, 6): -1.0}}, not {bias!r}")
    return pairs


def _processors(value: Any) -> tuple[Callable[..., Any], ...]:
    if value is None:
        return ()
    processors = tuple(value) if isinstance(value, _LISTS) else (value,)
    for processor in processors:
        if not callable(processor):
            raise SettingsError(
                "logits_processor must be functions of (input_ids, scores), such as transformers' "
                f"LogitsProcessor, not {processor!r}"
            )
    return processors


def _salt(value: Any) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"cache_salt must be a string, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"cache_salt has half a character in it: {error.reason}") from None
    return value


def _stop_strings(value: Any, limits: Limits) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not (isinstance(strings, _LISTS) and all(isinstance(s, str) and s for s in strings)):
        raise SettingsError(f"stop_strings must be non-empty strings, not {value!r}")
    if strings and not limits.has_tokenizer:
        raise SettingsError(
            "stop_strings need a tokenizer, which this model has not; stop on token ids with "
            "eos_token_id=[…]"
        )
    return tuple(strings)
