"""What a request asks for is honoured, asks for nothing, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from jackfield.errors import SettingsError, quoted
from jackfield.requests.arguments import OF_LOADING
from jackfield.requests.chat_settings import OF_A_CHAT
from jackfield.requests.habits import KEYWORDS
from jackfield.requests.instead import is_neutral, of_loading, of_request
from jackfield.requests.other_engines import ALIKE, LOADING, REQUESTS
from jackfield.requests.vocabulary import (
    ALIASES,
    ARGUMENTS,
    CODE,
    DRAFTING,
    FACTS,
    LOOP,
    OWN,
    REFUSED,
    asks_for_nothing,
)
from jackfield.requests.wishes import VOCABULARY, Wishes
from jackfield.spelling import nearest


@dataclass(frozen=True)
class Limits:
    """What settings are checked against: the model's vocabulary and context, and the strategy.

    `elsewhere` says for a setting that the strategy does not honour which one does ("": none).
    Of the prompt `image_tokens` stand for its images.
    """

    vocab_size: int
    context_length: int | None
    honoured: frozenset[str]
    decoding: str
    has_tokenizer: bool
    elsewhere: Callable[[str], str] = lambda _: ""
    image_tokens: int = 0


def refuse_unhonoured(wishes: Wishes, limits: Limits) -> None:
    """Raise SettingsError for a name that is unknown, or a wish that would be dropped."""
    given = wishes.given
    for name in wishes.of_caller:
        if name not in limits.honoured and not is_neutral(name, given.get(name)):
            _check_known(name, limits, given.get(name))
    for name, value in unmet(wishes, limits.honoured):
        foreign = name not in VOCABULARY | OWN
        if foreign and name in KEYWORDS and KEYWORDS[name].asks_for_nothing(value):
            continue
        if foreign and is_neutral(name, value):
            continue
        if name in CODE:
            raise SettingsError(f"{name} is not a setting of a request: {CODE[name]}")
        if name in ARGUMENTS:
            raise SettingsError(f"{name} is not a setting of a request: {ARGUMENTS[name]}")
        if foreign and name in KEYWORDS.keys() | OF_LOADING:
            raise SettingsError(f"{name} is not a setting of a request: {_instead(name)}")
        lift = f"lift it with {name}=None" if wishes.of_the_model(name) else "so drop it"
        advice = f"; {REFUSED[name]}" if name in REFUSED else ""
        raise SettingsError(
            f"the decoding {limits.decoding!r} does not honour {name}={quoted(value)}"
            f"{wishes.origin(name)}; it is never ignored, {lift} or choose a decoding that does"
            f"{limits.elsewhere(name)}{advice}"
        )


def unmet(wishes: Wishes, honoured: Set[str]) -> Iterator[tuple[str, Any]]:
    """What is asked for and neither the loop nor a decoding that has `honoured` does."""
    for name, value in wishes.given.items():
        if name in LOOP | honoured | FACTS or asks_for_nothing(name, value):
            continue
        if wishes.of_the_model(name) and name in DRAFTING:
            continue  # `notice_selectors` has told
        yield name, value


def _instead(name: str) -> str:
    """What to write for a keyword of loading or of pipelines."""
    ours = name if name in OF_LOADING else KEYWORDS[name].ours
    return KEYWORDS[name].answer if ours is None else f"jackfield.load(…, {ours}=…) has it"


def _check_known(name: object, limits: Limits, value: Any) -> None:
    """Whether there is such a setting; also one that is None."""
    if not isinstance(name, str):
        raise SettingsError(f"a setting has a name, and {quoted(name)} is none")
    if name in VOCABULARY | OWN | FACTS | CODE.keys() | ARGUMENTS.keys() | KEYWORDS.keys():
        return
    if name in limits.honoured | OF_LOADING:
        return
    if name in REQUESTS:
        raise SettingsError(f"there is no setting {name!r}: {of_request(name, value)}")
    if name in LOADING:
        instead = of_loading(name, value)
        raise SettingsError(f"{name} is of jackfield.load, not of a request: {instead}")
    known = LOOP | limits.honoured | ALIASES.keys() | {*OF_A_CHAT}
    near = nearest(name, known, ALIKE)
    raise SettingsError(
        f"there is no setting {quoted(name)}{near} (settings are the fields of "
        f"transformers' GenerationConfig, and {', '.join(sorted(OWN))})"
    )
