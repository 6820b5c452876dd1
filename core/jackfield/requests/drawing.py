"""Whether tokens are drawn, from which, and by which random numbers."""

from __future__ import annotations

from typing import Any

from jackfield.errors import SettingsError, quoted
from jackfield.requests.checked_numbers import CheckedNumbers
from jackfield.requests.vocabulary import asks_for_nothing
from jackfield.requests.wishes import Wishes

_KNOBS = ("temperature", "top_k", "top_p", "min_p")


def drawing(wishes: Wishes, honoured: frozenset[str]) -> dict[str, Any]:
    """The fields of `Settings` that say how tokens are drawn; neutral ones for a greedy request."""
    if not _draws(wishes, honoured):
        _read(CheckedNumbers(wishes.keywords))  # wrong ones are refused all the same
        return {"do_sample": False}
    return {"do_sample": True, **_read(CheckedNumbers(wishes.given))}


def _read(number: CheckedNumbers) -> dict[str, Any]:
    return {
        "temperature": number.real("temperature", 1.0, at_least=0),
        "top_k": number.integer("top_k", 0, at_least=0),
        "top_p": number.real("top_p", 1.0, above=0, at_most=1),
        "min_p": number.real("min_p", 0.0, at_least=0, at_most=1),
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
    cold = CheckedNumbers(wishes.given).real("temperature", 1.0, at_least=0) == 0
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


def seed(wishes: Wishes, *, draws: bool) -> int:
    """The caller's, or one that is drawn from torch's default generator, if it is needed.

    So `torch.manual_seed` and transformers' `set_seed` decide, in the order of requests.
    """
    asked = CheckedNumbers(wishes.given).integer("seed", 0)
    if "seed" in wishes.given or not draws:
        return asked
    import torch

    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(
        generator=torch.default_generator
    )
    return int(drawn)
