"""What weights take with each quantizer, and a request with each cache: as the backends say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.choosing.planning import Plan
from jackfield.choosing.registry import Registered
from jackfield.choosing.selection import make_options
from jackfield.choosing.solving import judge
from jackfield.contracts import Requirements
from jackfield.errors import JackfieldError


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


def told(ask: Callable[..., Any], *arguments: Any) -> int | None:
    """What a backend says of its size; nothing where its own code breaks."""
    try:
        found = ask(*arguments)
    except (Exception, SystemExit):  # noqa: BLE001 - a plugin must not break its host
        return None
    return found if type(found) is int and found >= 0 else None


def weights_by_quantizer(planned: Plan) -> list[WeightBytes]:
    """One row for every quantizer, the chosen one with its own options."""
    rows = []
    for registered, options, chosen, reasons in _backends(planned, "quantizer"):
        needs, size = planned.requirements, None
        if not reasons:
            implied = _implied(registered, needs, options)
            needs = implied or needs
        if options is not None:
            size = told(registered.backend.weight_bytes, needs, options)  # type: ignore[attr-defined]
        rows.append(WeightBytes(registered, chosen, needs.dtype, size, tuple(reasons)))
    return rows


def _implied(registered: Registered, needs: Requirements, options: Any) -> Requirements | None:
    try:
        return registered.backend.imply(needs, options)
    except (Exception, SystemExit):  # noqa: BLE001 - a plugin must not break its host
        return None


def requests_by_cache(planned: Plan, lengths: Sequence[int]) -> list[CacheBytes]:
    """One row for every cache; what it holds can be known where it cannot run here, too."""
    rows = []
    for registered, options, chosen, reasons in _backends(planned, "cache"):
        held = {}
        for tokens in lengths if options is not None else ():
            ask: Any = registered.backend
            if (size := told(ask.request_bytes, planned.requirements, options, tokens)) is None:
                break
            held[tokens] = size
        rows.append(CacheBytes(registered, chosen, held, tuple(reasons)))
    return rows


def _backends(planned: Plan, kind: str) -> list[tuple[Registered, Any, bool, list[str]]]:
    """(backend, its options, whether it is chosen, reasons against it) for each of `kind`."""
    from jackfield.choosing.discovery import registry

    found: list[tuple[Registered, Any, bool, list[str]]] = []
    for registered in registry().of_kind(kind):
        if planned[kind].registered is registered:
            found.append((registered, planned[kind].options, True, []))
            continue
        try:
            options = make_options(registered.backend.options, {}, registered.name)
        except JackfieldError as error:
            found.append((registered, None, False, [str(error)]))
            continue
        reasons = judge(registered.backend, planned.requirements, options)
        found.append((registered, options, False, reasons))
    return found
