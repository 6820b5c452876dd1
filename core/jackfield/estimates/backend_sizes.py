"""What weights take with each quantizer, and a request with each cache: as the backends say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jackfield.contracts import Requirements
from jackfield.contracts.advice import for_advice
from jackfield.errors import JackfieldError
from jackfield.planning.planning import Plan
from jackfield.planning.solving import reasons_against
from jackfield.registry.backends import Registered
from jackfield.spelling import AUTO


@dataclass(frozen=True)
class WeightBytes:
    """What all weights take with one quantizer; None where it does not say.

    `reasons` are those against it for this job.
    """

    registered: Registered
    chosen: bool
    dtype: str
    num_bytes: int | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheBytes:
    """What one request holds with one cache, by its tokens; nothing where it does not say."""

    registered: Registered
    chosen: bool
    request_bytes: Mapping[int, int]
    reasons: tuple[str, ...] = ()


def weights_by_quantizer(planned: Plan) -> list[WeightBytes]:
    """One row for every quantizer, the chosen one with its own options."""
    rows = []
    for registered, options, chosen, reasons in _backends(planned, "quantizer"):
        needs, size = planned.requirements, None
        if not reasons:
            needs = _implied(registered, needs, options)
        if options is not None:
            size = registered.size("weight_bytes", needs, options)
        rows.append(WeightBytes(registered, chosen, needs.dtype, size, tuple(reasons)))
    return rows


def _implied(registered: Registered, needs: Requirements, options: Any) -> Requirements:
    """What its weights are kept in; `needs` where its own code breaks."""
    try:
        implied = registered.ask("imply", needs, options)
    except JackfieldError:
        return needs
    return implied if isinstance(implied, Requirements) else needs


def requests_by_cache(planned: Plan, lengths: Sequence[int]) -> list[CacheBytes]:
    """One row for every cache; what it holds can be known where it cannot run here, too."""
    rows = []
    for registered, options, chosen, reasons in _backends(planned, "cache"):
        held = {}
        for tokens in lengths if options is not None else ():
            size = registered.size("request_bytes", planned.requirements, options, tokens)
            if size is None:
                break
            held[tokens] = size
        rows.append(CacheBytes(registered, chosen, held, tuple(reasons)))
    return rows


def _backends(planned: Plan, kind: str) -> list[tuple[Registered, Any, bool, list[str]]]:
    """(backend, its options, whether it is chosen, reasons against it) for each of `kind`."""
    from jackfield.registry.discovery import registry

    needs = planned.requirements
    if planned["compiler"].how == AUTO:  # another plan would have none
        needs = replace(needs, compiled=False, recorded=False)
    found: list[tuple[Registered, Any, bool, list[str]]] = []
    for registered in registry().of_kind(kind):
        if planned[kind].registered is registered:
            found.append((registered, planned[kind].options, True, []))
            continue
        try:
            options = registered.options()
        except JackfieldError as error:
            found.append((registered, None, False, [str(error)]))
            continue
        with for_advice():
            reasons = reasons_against(registered, needs, options)
        found.append((registered, options, False, reasons))
    return found
