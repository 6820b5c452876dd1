"""Who asks for what: a caller's keywords, over a `GenerationConfig`, over the model's own.

A `GenerationConfig`, whether a caller's object or read from a model's file, means what it means to
`generate` of transformers: it is greedy unless it says `do_sample`, and then it cuts to the 50
likeliest tokens unless it says otherwise. Keywords mean what `docs/departures.md` says. A keyword
that is None lifts what a config says.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from jackfield.errors import SettingsError, quoted
from jackfield.requests.checked_numbers import plain
from jackfield.requests.vocabulary import (
    ALIASES,
    CODE,
    DRAFTING,
    FACTS,
    FILLED_IN,
    RETURNED,
    START,
    asks_for_nothing,
)

logger = logging.getLogger("jackfield")

VOCABULARY = frozenset(k for k in vars(GenerationConfig()) if not k.startswith("_"))

#: Of each pair transformers takes the first, where one config has both.
_FIRST = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}
#: What a file might hold beside fields, and choose code by.
_STRAY = ("assistant_model", "custom_generate")


_LETTERS = f"{string.ascii_lowercase}_"
_SET_BY_THE_MODEL = ", which the model's generation_config sets"


@dataclass(frozen=True)
class Wishes:
    """What a request asks for. No value is None.

    `keywords` are the caller's; `config` is what the caller's object and the model's own say
    together, less what keywords lift; `of_caller` are the names that the caller gave in any way.
    """

    keywords: Mapping[str, Any]
    config: Mapping[str, Any]
    of_caller: frozenset[str]

    @property
    def given(self) -> dict[str, Any]:
        return {**self.config, **self.keywords}

    def of_the_model(self, name: str) -> bool:
        """Whether the model's own config is where a field comes from."""
        return name in self.config and name not in self.of_caller

    def origin(self, name: str) -> str:
        """Where a field comes from, for a message, if it is not the caller."""
        of_model = self.of_the_model(name)
        return _SET_BY_THE_MODEL if of_model else ""

    def told(self, error: str) -> str:
        """An error that begins with the name of a field, with where the field comes from."""
        name = error[: len(error) - len(error.lstrip(_LETTERS))]
        known = not self.of_the_model(name) or _SET_BY_THE_MODEL in error
        return error if known else f"{error}{_SET_BY_THE_MODEL}; lift it with {name}=None"


def wishes(asked: Mapping[str, Any], defaults: GenerationConfig) -> Wishes:
    """What `asked` by a caller means over the model's own `defaults`. Raises SettingsError."""
    asked = {name: plain(value) for name, value in asked.items()}
    given = asked.pop("generation_config", None)
    asked = _renamed(asked)
    if given is not None and not isinstance(given, GenerationConfig):
        raise SettingsError(f"generation_config must be a GenerationConfig, not {quoted(given)}")
    fields = {} if given is None else _renamed(_fields(given))
    fields = {k: v for k, v in fields.items() if k in VOCABULARY or not _is_a_fact(k, v, defaults)}
    config = {**_of_a_file(defaults), **fields}
    config = {k: v for k, v in config.items() if asked.get(k, v) is not None}
    config = {k: v for k, v in config.items() if not _is_second(k, config)}
    if config.get("do_sample") is True:
        filled = {k: v for k, v in FILLED_IN.items() if asked.get(k, v) is not None}
        config = {**filled, **config}
    keywords = {k: v for k, v in asked.items() if v is not None}
    return Wishes(keywords, config, frozenset(asked) | frozenset(fields))


def refuse_unnamed(given: Sequence[Any]) -> None:
    """Raise SettingsError for what stands behind the prompts without a name."""
    if not given:
        return
    first = given[0]
    if isinstance(first, GenerationConfig):
        raise SettingsError(
            "a second argument has a name: write engine.generate(prompt, generation_config=…)"
        )
    raise SettingsError(
        f"a second argument has a name, and {quoted(first)} has none; several prompts are one "
        "list: engine.generate([…, …], max_new_tokens=20)"
    )


def mapping(own: Any) -> Mapping[str, Any]:
    """The settings of one prompt, as its caller gave them. Raises SettingsError."""
    if not isinstance(own, Mapping):
        raise SettingsError(f"settings are mappings, one for each prompt, not {quoted(own)}")
    return own


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(fields)
    for alias, name in ALIASES.items():
        if alias not in found:
            continue
        value = found.pop(alias)
        if value is not None and found.get(name) is not None:
            raise SettingsError(f"{alias} and {name} are the same setting; give one of them")
        if found.get(name) is None:
            found[name] = value
    return found


def _fields(config: GenerationConfig) -> dict[str, Any]:
    """What an object says: no facts about the model but the one that a request may change."""
    own = {k: plain(v) for k, v in vars(config).items() if not k.startswith("_")}
    return {k: v for k, v in own.items() if v is not None and k not in FACTS - {START}}


def _is_a_fact(name: str, value: Any, defaults: GenerationConfig) -> bool:
    """Whether an object only repeats what the model's own says beside transformers' fields.

    Whisper's has the tokens of its languages, and a caller's is a copy of it.
    """
    own = vars(defaults).get(name)
    try:
        return type(value) is type(own) and bool(value == own)
    except Exception:  # noqa: BLE001 - what nothing can be told of is the caller's, and refused as such
        return False


def _of_a_file(config: GenerationConfig) -> dict[str, Any]:
    """What a model's own config says, whose files may hold anything and never choose code."""
    unread = CODE.keys() | RETURNED
    return _renamed({k: v for k, v in _fields(config).items() if k in VOCABULARY - unread})


def _is_second(name: str, config: Mapping[str, Any]) -> bool:
    return any(first in config and name == second for first, second in _FIRST.items())


def notice_selectors(config: GenerationConfig | None, honoured: Set[str], whose: str) -> None:
    """Log what a model's own `config` says about how things run, which is ignored.

    Nothing is lost of what the decodings have `honoured`.
    """
    said = {} if config is None else _fields(config)
    for name in (*CODE, *DRAFTING, *_STRAY):
        if name in said and name not in honoured and not asks_for_nothing(name, said[name]):
            logger.warning(
                "ignored %s=%s in the generation_config of %s: data never selects code",
                name, quoted(said[name]), whose,
            )  # fmt: skip
    for name in sorted(RETURNED & said.keys()):
        if not asks_for_nothing(name, said[name]):
            logger.warning(
                "ignored %s=%s in the generation_config of %s: a call asks for what it returns",
                name, quoted(said[name]), whose,
            )  # fmt: skip
