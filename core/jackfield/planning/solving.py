"""The first backends, kind by kind, that fit together, or why none do, and its wording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jackfield.contracts import Requirements
from jackfield.contracts.advice import for_advice
from jackfield.contracts.backend import Recordable
from jackfield.errors import JackfieldError, quoted
from jackfield.planning.candidates import Candidate, Candidates
from jackfield.registry.backends import Choice, Registered, Registry
from jackfield.spelling import AUTO, Quantizable

#: The order in which kinds are decided: what one implies (dtype, rollback, layout) the next must
#: meet.
ORDER = ("compiler", "quantizer", "scheduler", "decoding", "cache", "attention")

#: kind -> the argument of `jackfield.load` that selects it
ARGUMENTS = {
    "attention": "attn_implementation",
    "cache": "cache_implementation",
    "compiler": "compile",
    "decoding": "decoding",
    "kernel": "kernels",
    "quantizer": "quantization",
    "scheduler": "scheduler",
}


#: How reasons begin against what is no part of a step that is recorded whole.
UNRECORDED = "cannot be recorded in whole steps"


@dataclass(frozen=True)
class Refusal:
    """A backend that was considered and not taken, with every reason.

    `within` holds the refusals of the next kind, where it is only these that stand in the way.
    """

    registered: Registered
    reasons: tuple[str, ...]
    within: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        return f"{self.registered.name} ({'; '.join(self.reasons)})"


@dataclass(frozen=True)
class Solution:
    """A choice for each kind, what is required with all of them, and what was passed over."""

    requirements: Requirements
    choices: dict[str, Choice]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class One:
    """A single candidate, whatever the job."""

    candidate: Candidate

    def of(self, needs: Requirements) -> Iterator[Candidate]:
        del needs
        yield self.candidate


def solve(
    kinds: tuple[str, ...], needs: Requirements, candidates: Mapping[str, Candidates | One]
) -> Solution | tuple[Refusal, ...]:
    """The first choice for `kinds` that works, or a refusal of each candidate for the first kind.

    `needs` is what the job and the kinds decided before require.
    """
    if not kinds:
        return Solution(needs, {}, ())
    refusals: list[Refusal] = []
    for candidate in candidates[kinds[0]].of(needs):
        registered = candidate.registered
        implied = _implied(candidate, needs)
        if isinstance(implied, list):
            refusals.append(Refusal(registered, tuple(implied)))
            continue
        found = solve(kinds[1:], implied, candidates)
        if isinstance(found, Solution):
            choice = Choice(registered, candidate.options, candidate.how)
            choices = {kinds[0]: choice, **found.choices}
            return Solution(found.requirements, choices, (*refusals, *found.refusals))
        reason = f"no {kinds[1]} fits with it: {', '.join(map(str, found))}"
        refusals.append(Refusal(registered, (reason,), found))
    return tuple(refusals)


def _implied(candidate: Candidate, needs: Requirements) -> Requirements | list[str]:
    """What a backend demands of the kinds decided later, or the reasons against it."""
    registered, options = candidate.registered, candidate.options
    if reasons := reasons_against(registered, needs, options):
        return reasons
    try:
        implied = registered.ask("imply", needs, options)
    except JackfieldError as error:
        return [str(error)]
    if isinstance(implied, Requirements):
        return implied
    return [f"{registered}: imply must return Requirements, got {quoted(implied)}"]


def reasons_against(registered: Registered, needs: Requirements, options: Any) -> list[str]:
    """Every reason against a backend for this job. One whose check breaks is refused with it.

    What this machine lacks is no reason where the job is another's (`needs.elsewhere`).
    """
    reasons = (
        *(() if needs.elsewhere else reasons_of(registered, "available")),
        *reasons_of(registered, "refuse", needs, options),
        *reasons_of(registered, "impossible", needs),
        *_reasons_against_recording(registered, needs, options),
    )
    return list(dict.fromkeys(reasons))


def _reasons_against_recording(
    registered: Registered, needs: Requirements, options: Any
) -> list[str]:
    if not needs.recorded or not isinstance(registered.backend, Recordable):
        return []
    against = reasons_of(registered, "unrecordable", needs, options)
    return [f"{UNRECORDED}: {reason}" for reason in against]


def reasons_of(registered: Registered, check: str, *arguments: Any) -> list[str]:
    """What the backend's own `check` returns; where it breaks, that is the reason."""
    try:
        reasons = registered.ask(check, *arguments)
    except JackfieldError as error:
        return [str(error)]
    if isinstance(reasons, list | tuple) and all(isinstance(r, str) for r in reasons):
        return list(reasons)
    return [f"{registered}: {check} must return a list of reasons, got {quoted(reasons)}"]


def failure(
    refusals: tuple[Refusal, ...],
    registry: Registry,
    needs: Requirements,
    candidates: Mapping[str, Candidates],
    selections: Mapping[str, Quantizable],
) -> str:
    """One line: what was asked, every reason against it, and what would be accepted."""
    asked = {kind: f"{ARGUMENTS[kind]}={_shown(selections[kind])}" for kind in ORDER}
    if empty := [kind for kind in ORDER if not any(candidates[kind].of(needs))]:
        return (
            f"{asked[empty[0]]} finds no {empty[0]} backend: no plugin offers one that may be "
            "chosen by itself; the built-in ones come with `pip install jackfield` "
            "(see `jackfield doctor`)"
        )
    decided = []
    while deeper := _to_blame(refusals, selections):
        decided.append(refusals[0].registered.kind)
        refusals = deeper
    kind = refusals[0].registered.kind
    given = [asked[k] for k in decided if selections[k] != AUTO]
    reasons = dict.fromkeys(map(str, refusals))
    return (
        f"{asked[kind]} cannot run {needs.architecture} here"
        f"{' with ' + ', '.join(given) if given else ''}: {', '.join(reasons)}; "
    ) + _advice(registry, kind, needs, candidates)


def _shown(selected: Any) -> str:
    return f"{type(selected).__name__}(…)" if hasattr(selected, "quant_method") else repr(selected)


def _to_blame(
    refusals: tuple[Refusal, ...], selections: Mapping[str, Quantizable]
) -> tuple[Refusal, ...]:
    """The refusals of the next kind, where these stand in the way only because of them.

    Of backends that `auto` tried, one that would do but for the next kind is enough.
    """
    within = [refusal.within for refusal in refusals if refusal.within]
    auto = selections[refusals[0].registered.kind] == AUTO
    blamed = bool(within) if auto else len(within) == len(refusals)
    return tuple(r for several in within for r in several) if blamed else ()


def _advice(
    registry: Registry, kind: str, needs: Requirements, candidates: Mapping[str, Candidates]
) -> str:
    """Which backends of `kind` would make a plan with all else as it was asked for."""
    fitting = []
    for registered in registry.of_kind(kind):
        try:
            options = registered.options()
        except JackfieldError:  # it needs an option, which we cannot know
            continue
        instead: dict[str, Candidates | One] = {
            **candidates,
            kind: One(Candidate(registered, options, "named")),
        }
        with for_advice():
            found = solve(ORDER, needs, instead)
        if isinstance(found, Solution):
            fitting.append(registry.address(registered))
    return f"use {' or '.join(map(repr, fitting))}" if fitting else f"no other {kind} can either"
