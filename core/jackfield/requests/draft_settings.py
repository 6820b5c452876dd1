"""What a request may ask of its decoding strategy, under transformers' own names."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from jackfield.contracts.settings import DraftSettings
from jackfield.errors import SettingsError, quoted
from jackfield.requests.checked_numbers import CheckedNumbers

#: How the number of drafts of a request goes on: as it is, or longer after all were right and
#: shorter after one was not. transformers keeps the latter two apart by whether the length outlives
#: the request, which it never does here.
SCHEDULES = ("constant", "heuristic", "heuristic_transient")


_COUNTS = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens")


def read(given: Mapping[str, Any], honoured: Set[str], number: CheckedNumbers) -> DraftSettings:
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
