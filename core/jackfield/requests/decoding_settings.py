"""What a request may ask of its decoding, under transformers' own names: of drafts, of a search."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from jackfield.contracts.settings import BeamSettings, DraftSettings
from jackfield.errors import SettingsError, quoted
from jackfield.requests.checked_numbers import CheckedNumbers

#: How the number of drafts of a request goes on: as it is, or longer after all were right and
#: shorter after one was not. transformers keeps the latter two apart by whether the length outlives
#: the request, which it never does here.
SCHEDULES = ("constant", "heuristic", "heuristic_transient")
_COUNTS = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens")


def drafts(given: Mapping[str, Any], honoured: Set[str], number: CheckedNumbers) -> DraftSettings:
    """The fields of `given` that the strategy honours. Raises SettingsError."""
    own = given.keys() & honoured
    found: dict[str, Any] = {
        name: number.integer(name, 1, at_least=1) for name in _COUNTS if name in own
    }
    if (name := "assistant_confidence_threshold") in own:
        found[name] = number.real(name, 0.0, at_least=0, at_most=1)
    if (name := "num_assistant_tokens_schedule") in own:
        if not isinstance(given[name], str) or given[name] not in SCHEDULES:
            raise SettingsError(
                f"{name} must be one of {', '.join(SCHEDULES)}, not {quoted(given[name])}"
            )
        found[name] = given[name]
    return DraftSettings(**found)


def beams(given: Mapping[str, Any], honoured: Set[str], number: CheckedNumbers) -> BeamSettings:
    """The fields of `given` that the strategy honours. Raises SettingsError."""
    own = given.keys() & honoured
    found: dict[str, Any] = {}
    if "num_beams" in own:
        found["num_beams"] = number.integer("num_beams", 1, at_least=2)
    if "length_penalty" in own:
        found["length_penalty"] = number.real("length_penalty", 1.0)
    if "num_beam_groups" in own:
        found["num_beam_groups"] = number.integer("num_beam_groups", 1, at_least=1)
    if "diversity_penalty" in own:
        found["diversity_penalty"] = number.real("diversity_penalty", 0.0)
    if "early_stopping" in own:
        value = given["early_stopping"]
        if not (isinstance(value, bool) or (isinstance(value, str) and value == "never")):
            raise SettingsError(
                f'early_stopping must be True, False or "never", not {quoted(value)}'
            )
        found["early_stopping"] = value
    return BeamSettings(**found)


def check_penalty(asked: BeamSettings, longest: int) -> None:
    """Raise SettingsError where a score divided by length ** length_penalty would be no number."""
    penalty = asked.length_penalty or 0.0
    try:
        float(longest) ** abs(penalty)
    except OverflowError:
        raise SettingsError(
            f"length_penalty={penalty:g} makes scores of {longest} tokens overflow; take one "
            "closer to 0"
        ) from None


def check_width(width: int, answers: int, vocab_size: int, places: int) -> None:
    """Raise SettingsError where `width` beams cannot be, or cannot give so many `answers`."""
    if answers > width:
        raise SettingsError(
            f"num_return_sequences={answers} is more than num_beams={width}; raise num_beams, or "
            "ask for fewer"
        )
    if width > vocab_size:
        raise SettingsError(
            f"num_beams={width} is more than the vocabulary of {vocab_size} tokens has ways to go "
            "on; lower it"
        )
    if width > places:
        raise SettingsError(
            f"num_beams={width} needs as many places in a batch, and max_batch_size={places}; "
            "lower it, or load with a larger max_batch_size"
        )
