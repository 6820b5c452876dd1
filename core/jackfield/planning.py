"""From selections to a plan: one backend per kind, decided before a weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.contracts import Backend, Requirements
from jackfield.errors import PlanError
from jackfield.registry import Registered, Registry
from jackfield.selection import AUTO, Selectable, Selection, make_options, parse_all

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger("jackfield")

#: The order in which kinds are decided: what one implies (rollback, layout) the next must meet.
ORDER = ("decoding", "cache", "attention")

#: kind -> the argument of `jackfield.load` that selects it
ARGUMENTS = {
    "attention": "attn_implementation",
    "cache": "cache_implementation",
    "decoding": "decoding",
}


@dataclass(frozen=True)
class Choice:
    """The backend chosen for a kind, its checked options, and how it came to be chosen."""

    registered: Registered
    options: Any
    how: str  # "named", "auto" or "fallback"

    @property
    def backend(self) -> Any:
        return self.registered.backend

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.registered.name,
            "distribution": self.registered.distribution,
            "version": self.registered.version,
            "options": dict(vars(self.options)) if hasattr(self.options, "__dict__") else {},
            "how": self.how,
        }


@dataclass(frozen=True)
class Refusal:
    """A backend that was considered and not taken, with every reason."""

    registered: Registered
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.registered.name} ({'; '.join(self.reasons)})"


@dataclass(frozen=True)
class Plan:
    """One backend per kind that fit together, with the reasons against the rest."""

    requirements: Requirements
    choices: Mapping[str, Choice]
    refusals: tuple[Refusal, ...] = ()

    def __getitem__(self, kind: str) -> Choice:
        return self.choices[kind]

    def to_dict(self) -> dict[str, Any]:
        needs = self.requirements
        return {
            "architecture": needs.architecture,
            "dtype": needs.dtype,
            "device": needs.device,
            "layout": needs.layout,
            "features": dict(needs.features),
            "chosen": {kind: choice.to_dict() for kind, choice in self.choices.items()},
            "refused": [
                {"kind": r.registered.kind, "name": r.registered.name,
                 "distribution": r.registered.distribution, "reasons": list(r.reasons)}
                for r in self.refusals
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        needs = self.requirements
        lines = [f"{needs.architecture}, {needs.dtype} on {needs.device}, {needs.layout} layout"]
        lines += [f"  needs {name}: {evidence}" for name, evidence in needs.features.items()]
        for kind, choice in self.choices.items():
            r = choice.registered
            lines.append(f"  {kind}: {r.name} ({choice.how}), {r.distribution} {r.version}")
        lines += [
            f"  passed over: {r.registered.kind} {r.registered.name}: {'; '.join(r.reasons)}"
            for r in self.refusals
        ]
        return "\n".join(lines)


@dataclass
class _Candidate:
    registered: Registered
    options: Any
    how: str


@dataclass
class _Search:
    """One search through the candidates of each kind, with every refusal on the way."""

    requirements: Requirements
    candidates: Mapping[str, list[_Candidate]]
    refusals: dict[tuple[str, str, str], Refusal] = field(default_factory=dict)

    def solve(
        self, kinds: tuple[str, ...], needs: Requirements
    ) -> tuple[Requirements, dict[str, Choice]] | None:
        """The first choice for `kinds` that works, given what earlier kinds imply in `needs`."""
        if not kinds:
            return needs, {}
        for candidate in self.candidates[kinds[0]]:
            reasons = judge(candidate.registered.backend, needs, candidate.options)
            if not reasons:
                implied = candidate.registered.backend.imply(needs)
                if found := self.solve(kinds[1:], implied):
                    final, rest = found
                    choice = Choice(candidate.registered, candidate.options, candidate.how)
                    return final, {kinds[0]: choice, **rest}
                reasons = [f"no {kinds[1]} fits with it"]
            self.note(candidate.registered, reasons)
        return None

    def note(self, registered: Registered, reasons: list[str]) -> None:
        key = (registered.kind, registered.distribution, registered.name)
        self.refusals[key] = Refusal(registered, tuple(reasons))


def judge(backend: Backend, needs: Requirements, options: Any) -> list[str]:
    """Every reason against `backend` for this job. One that raises is refused with its error."""
    try:
        return [*backend.available(), *backend.refuse(needs, options)]
    except Exception as error:  # noqa: BLE001 - a plugin must not break its host
        return [f"its own check raised {type(error).__name__}: {error}"]


def decide(registry: Registry, needs: Requirements, selections: Mapping[str, Selectable]) -> Plan:
    """Choose one backend per kind. Raises SelectionError, OptionError or PlanError.

    A named backend is never swapped; "auto" tries backends by rank; a list is tried in its order.
    """
    candidates = {kind: list(_candidates(registry, kind, selections[kind])) for kind in ORDER}
    search = _Search(needs, candidates)
    found = search.solve(ORDER, needs)
    if found is None:
        raise PlanError(_failure(search, registry, selections))
    final, choices = found
    plan = Plan(final, choices, tuple(search.refusals.values()))
    for choice in choices.values():
        if choice.how != "named":
            logger.info("%s chose %s", choice.how, choice.registered)
    for refusal in plan.refusals:
        logger.info("passed over %s: %s", refusal.registered, "; ".join(refusal.reasons))
    return plan


def _candidates(registry: Registry, kind: str, value: Selectable) -> Iterator[_Candidate]:
    parsed = parse_all(value)
    how = "named" if len(parsed) == 1 else "fallback"
    for item in parsed:
        if isinstance(item, Selection):
            registered = registry.find(kind, item)
            owner = f"{kind} {registered.name!r}"
            options = make_options(registered.backend.options, item.arguments, owner)
            yield _Candidate(registered, options, how)
        else:
            yield from _automatic(registry, kind)


def _automatic(registry: Registry, kind: str) -> Iterator[_Candidate]:
    ranked = [r for r in registry.of_kind(kind) if r.backend.auto_rank is not None]
    for r in sorted(ranked, key=lambda r: -(r.backend.auto_rank or 0)):
        yield _Candidate(r, make_options(r.backend.options, {}, r.name), AUTO)


def _failure(search: _Search, registry: Registry, selections: Mapping[str, Selectable]) -> str:
    """One line: what was asked, every reason against it, and what would be accepted."""
    kind = next(
        (k for k in ORDER if not search.candidates[k]),
        next((r.registered.kind for r in reversed(search.refusals.values())
              if not r.reasons[0].startswith("no ")), ORDER[-1]),
    )  # fmt: skip
    asked = f"{ARGUMENTS[kind]}={selections[kind]!r}"
    needs = search.requirements
    if not search.candidates[kind]:
        return (
            f"{asked} finds no {kind} backend: no plugin offers one that may be chosen by itself; "
            "the built-in ones come with `pip install jackfield` (see `jackfield doctor`)"
        )
    refused = [str(r) for r in search.refusals.values() if r.registered.kind == kind]
    accepted = [
        r.name for r in registry.of_kind(kind)
        if not judge(r.backend, needs, make_options(r.backend.options, {}, r.name))
    ]  # fmt: skip
    return f"{asked} cannot run {needs.architecture} here: {', '.join(refused)}; " + (
        f"use {' or '.join(map(repr, accepted))}" if accepted else f"no other {kind} can either"
    )


def plan(
    model: str | PreTrainedModel | PreTrainedConfig,
    *,
    attn_implementation: Selectable = AUTO,
    cache_implementation: Selectable = AUTO,
    decoding: Selectable = AUTO,
    dtype: str = AUTO,
    device_map: str = AUTO,
    revision: str | None = None,
) -> Plan:
    """Decide, without loading a weight, what `jackfield.load` would run with these arguments.

    `model` is a hub id, a folder, "demo", a config, or a live model. Raises the errors that
    `load` would raise.
    """
    from jackfield.bridge.requirements import requirements_of
    from jackfield.bridge.source import find
    from jackfield.discovery import registry

    needs = requirements_of(find(model, revision), dtype=dtype, device=device_map)
    selections = {
        "attention": attn_implementation,
        "cache": cache_implementation,
        "decoding": decoding,
    }
    return decide(registry(), needs, selections)
