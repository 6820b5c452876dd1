"""The backends that a selection lets be chosen, in order of preference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from jackfield.contracts import GivenConfig, Requirements
from jackfield.contracts.quantizing import method
from jackfield.errors import JackfieldError, PlanError, quoted
from jackfield.registry.backends import Registered, Registry
from jackfield.requests.habits import UNSAID
from jackfield.spelling import AUTO, Selection, parse_all

logger = logging.getLogger("jackfield")


@dataclass(frozen=True)
class Candidate:
    """A backend that may be chosen, its checked options, and how it came to be considered."""

    registered: Registered
    options: Any
    how: str


class Candidates:
    """What a selection lets be chosen for one kind, in order of preference.

    What `auto` may choose is asked for its rank anew for each job: what was decided for other kinds
    is a part of that. Raises SelectionError, OptionError or PlanError for what is named.
    """

    def __init__(self, registry: Registry, kind: str, value: Any, needs: Requirements) -> None:
        self._registry, self._kind = registry, kind
        self._told: set[str] = set()
        self._given: list[Candidate | None] = []  # None: those that `auto` finds
        if kind == "quantizer" and hasattr(value, "quant_method"):
            self._given = [self._reader(value, needs)]
            return
        parsed = parse_all(value)
        how = "named" if len(parsed) == 1 else "fallback"
        for item in parsed:
            if isinstance(item, Selection):
                registered = registry.find(kind, item)
                self._given.append(Candidate(registered, registered.options(item.arguments), how))
            else:
                self._given.append(None)

    def of(self, needs: Requirements) -> Iterator[Candidate]:
        """Those for this job, the preferred one first."""
        for candidate in self._given:
            if candidate is not None:
                yield candidate
                continue
            found = self._automatic(needs)
            # A method's own backend has the last word on a checkpoint that is quantized already.
            only = self._kind == "quantizer" and needs.stored
            yield from islice(found, 1) if only else found

    def _reader(self, config: Any, needs: Requirements) -> Candidate:
        """The quantizer that a transformers config object belongs to."""
        stored = config.to_dict()
        for candidate in self._automatic(replace(needs, stored=stored)):
            if candidate.registered.ask("reads", stored):
                return Candidate(candidate.registered, GivenConfig(config), "named")
        kind = type(config).__name__
        if kind in UNSAID:
            raise PlanError(f"quantization={kind}(…) {UNSAID[kind]}")
        raise PlanError(
            f"no quantizer backend takes a {kind} (method {method(stored)}); see "
            "`jackfield plugins` for those that there are"
        )

    def _automatic(self, needs: Requirements) -> Iterator[Candidate]:
        ranks = [(self._rank(r, needs), r) for r in self._registry.of_kind(self._kind) if r.bare]
        for _, r in sorted(
            ((rank, r) for rank, r in ranks if rank is not None), key=lambda pair: -pair[0]
        ):
            yield Candidate(r, self._options(r), AUTO)

    def _rank(self, registered: Registered, needs: Requirements) -> int | None:
        """Its rank for this job; None, only by name, and a warning, where its own code breaks."""
        try:
            rank = registered.ask("rank", needs)
        except JackfieldError as error:
            self._warn(str(error))
            return None
        if type(rank) in (int, type(None)):
            return rank  # type: ignore[no-any-return]
        self._warn(f"{registered}: rank gave {quoted(rank)}, not an int or None")
        return None

    def _options(self, registered: Registered) -> Any:
        """With which `auto` tries it; the defaults, and a warning, where its own code breaks."""
        wanted = registered.backend.options
        try:
            if isinstance(options := registered.ask("auto_options"), wanted):
                return options
            self._warn(f"{registered}: auto_options gave {quoted(options)}, not its options")
        except JackfieldError as error:
            self._warn(str(error))
        return registered.options()

    def _warn(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            logger.warning("auto passes over %s", why)
