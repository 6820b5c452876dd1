"""The backends that a selection lets be chosen, in order of preference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from jackfield.choosing.habits import UNSAID
from jackfield.choosing.registry import Registered, Registry
from jackfield.choosing.selection import AUTO, Selection, parse_all
from jackfield.contracts import GivenConfig, Requirements
from jackfield.contracts.quantizing import method
from jackfield.errors import JackfieldError, PlanError, quoted

logger = logging.getLogger("jackfield")


@dataclass(frozen=True)
class Candidate:
    """A backend that may be chosen, its checked options, and how it came to be considered."""

    registered: Registered
    options: Any
    how: str


def candidates_of(
    registry: Registry, kind: str, value: Any, needs: Requirements
) -> Iterator[Candidate]:
    if kind == "quantizer" and hasattr(value, "quant_method"):
        yield _reader(registry, value, needs)
        return
    parsed = parse_all(value)
    how = "named" if len(parsed) == 1 else "fallback"
    for item in parsed:
        if isinstance(item, Selection):
            registered = registry.find(kind, item)
            yield Candidate(registered, registered.options(item.arguments), how)
        else:
            found = _automatic(registry, kind, needs)
            # A method's own backend has the last word on a checkpoint that is quantized already.
            yield from islice(found, 1) if kind == "quantizer" and needs.stored else found


def _reader(registry: Registry, config: Any, needs: Requirements) -> Candidate:
    """The quantizer that a transformers config object belongs to."""
    stored = config.to_dict()
    for candidate in _automatic(registry, "quantizer", replace(needs, stored=stored)):
        if candidate.registered.ask("reads", stored):
            return Candidate(candidate.registered, GivenConfig(config), "named")
    kind = type(config).__name__
    if kind in UNSAID:
        raise PlanError(f"quantization={kind}(…) {UNSAID[kind]}")
    raise PlanError(
        f"no quantizer backend takes a {kind} (method {method(stored)}); see "
        "`jackfield plugins` for those that there are"
    )


def _automatic(registry: Registry, kind: str, needs: Requirements) -> Iterator[Candidate]:
    ranks = [(_rank(r, needs), r) for r in registry.of_kind(kind) if r.bare]
    for _, r in sorted(
        ((rank, r) for rank, r in ranks if rank is not None), key=lambda pair: -pair[0]
    ):
        yield Candidate(r, r.options(), AUTO)


def _rank(registered: Registered, needs: Requirements) -> int | None:
    """Its rank for this job; None, only by name, and a warning, where its own code breaks."""
    try:
        rank = registered.ask("rank", needs)
    except JackfieldError as error:
        logger.warning("auto passes over %s", error)
        return None
    if type(rank) in (int, type(None)):
        return rank  # type: ignore[no-any-return]
    logger.warning(
        "auto passes over %s: rank gave %s, not an int or None", registered, quoted(rank)
    )
    return None
