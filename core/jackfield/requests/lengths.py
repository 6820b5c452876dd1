"""How many tokens a request gets: at most, and at least."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jackfield.errors import PromptError, SettingsError, quoted
from jackfield.requests.checked_numbers import CheckedNumbers
from jackfield.requests.honouring import Limits
from jackfield.requests.wishes import Wishes

DEFAULT_MAX_NEW_TOKENS = 256


def max_new_tokens(wishes: Wishes, prompt_length: int, limits: Limits) -> int:
    """What a caller asked must fit into the context; any default is cut to what is left of it."""
    context = limits.context_length
    room = math.inf if context is None else context - prompt_length
    if room < 1:
        raise PromptError(
            f"the prompt has {prompt_length} tokens, the model's context is {context}: shorten the "
            f"prompt to at most {(context or 1) - 1} tokens"
        )
    for layer in (wishes.keywords, wishes.config):
        if name := _length_in(layer):
            wanted = _wanted(layer, name, wishes.origin(name), prompt_length)
            if wanted > room and not wishes.of_the_model(name):
                most = room if name == "max_new_tokens" else context
                raise PromptError(
                    f"a prompt of {prompt_length} tokens and {name}={quoted(layer[name])} do not "
                    f"fit into the model's context of {context}; lower {name} to {most}"
                )
            return int(min(wanted, room))
    return int(min(DEFAULT_MAX_NEW_TOKENS, room))


def _length_in(layer: Mapping[str, Any]) -> str:
    return next((name for name in ("max_new_tokens", "max_length") if name in layer), "")


def _wanted(layer: Mapping[str, Any], name: str, origin: str, prompt_length: int) -> int:
    value = CheckedNumbers(layer).integer(name, 0, at_least=1)
    if name == "max_new_tokens":
        return value
    if value <= prompt_length:
        raise SettingsError(
            f"max_length={value}{origin}, leaves no new token after a prompt of {prompt_length} "
            "tokens; raise it, or set max_new_tokens"
        )
    return value - prompt_length


def min_new_tokens(wishes: Wishes, prompt_length: int) -> int:
    """Of `min_new_tokens` and `min_length`, which counts the prompt, the former decides."""
    found = 0
    for layer in (wishes.config, wishes.keywords):
        number = CheckedNumbers(layer)
        if "min_length" in layer:
            found = max(0, number.integer("min_length", 0, at_least=0) - prompt_length)
        if "min_new_tokens" in layer:
            found = number.integer("min_new_tokens", 0, at_least=0)
    return found


def check_both(wishes: Wishes, least: int, most: int) -> None:
    """Raise SettingsError where more new tokens are asked for at least than at most."""
    if least > most:
        asked = f"min_new_tokens={quoted(least)}"
        if "min_new_tokens" not in wishes.given:
            asked = f"min_length, which leaves {asked},"
        raise SettingsError(
            f"{asked} is more than max_new_tokens={quoted(most)}; lower the one or raise the other"
        )
