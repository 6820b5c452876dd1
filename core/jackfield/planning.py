"""From selections to a plan: one backend per kind, decided before a weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from jackfield.contracts import Backend, GivenConfig, Requirements
from jackfield.contracts.quantizing import method
from jackfield.errors import JackfieldError, PlanError
from jackfield.memory import CacheMemory, free_bytes
from jackfield.registry import Registered, Registry
from jackfield.selection import (
    AUTO,
    Quantizable,
    Selectable,
    Selection,
    make_options,
    parse_all,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger("jackfield")

#: The order in which kinds are decided: what one implies (dtype, rollback, layout) the next must
#: meet.
ORDER = ("compiler", "quantizer", "scheduler", "decoding", "cache", "attention")

#: kind -> the argument of `jackfield.load` that selects it
ARGUMENTS = {
    "attention": "attn_implementation",
    "cache": "cache_implementation",
    "compiler": "compile",
    "decoding": "decoding",
    "quantizer": "quantization",
    "scheduler": "scheduler",
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
            "options": self.options.to_dict()
            if isinstance(self.options, GivenConfig)
            else asdict(self.options),
            "how": self.how,
        }


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
class Plan:
    """One backend per kind that fit together, with the reasons against the rest."""

    requirements: Requirements
    choices: Mapping[str, Choice]
    refusals: tuple[Refusal, ...] = ()

    def __getitem__(self, kind: str) -> Choice:
        return self.choices[kind]

    def memory(self) -> CacheMemory | None:
        """What keys and values cost and how much fits, by the memory that is free now.

        None where nobody can tell before the model runs.
        """
        needs, choice = self.requirements, self.choices["cache"]

        def request_bytes(tokens: int) -> int:
            return choice.backend.request_bytes(needs, choice.options, tokens)  # type: ignore[no-any-return]

        try:
            told = request_bytes(1) is not None
            available = choice.backend.pool_bytes(needs, choice.options)
        except Exception as error:  # noqa: BLE001 - a plugin must not break its host
            logger.warning("%s does not say what it takes: %s", choice.registered, error)
            return None
        if available is None and (free := free_bytes(needs.device)) is not None:
            available = max(0, free - needs.weight_bytes)
        if not told or available is None:
            return None
        return CacheMemory(available, needs.context_length, request_bytes)

    def to_dict(self) -> dict[str, Any]:
        needs, memory = self.requirements, self.memory()
        return {
            "architecture": needs.architecture,
            "dtype": needs.dtype,
            "device": needs.device,
            "layout": needs.layout,
            "features": dict(needs.features),
            "experts_implementation": needs.experts_implementation,
            "memory": memory.to_dict() if memory else None,
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
        if needs.experts_implementation:
            lines.append(f"  experts: {_experts(needs)}")
        for kind, choice in self.choices.items():
            r = choice.registered
            lines.append(f"  {kind}: {r.name} ({choice.how}), {r.distribution} {r.version}")
        if memory := self.memory():
            lines.append(f"  memory for keys and values: {memory}")
        lines += [
            f"  passed over: {r.registered.kind} {r.registered.name}: {'; '.join(r.reasons)}"
            for r in self.refusals
        ]
        return "\n".join(lines)


def _experts(needs: Requirements) -> str:
    why = needs.no_grouped_experts
    return f"{needs.experts_implementation}, since transformers' grouped product {why}"


@dataclass(frozen=True)
class _Candidate:
    registered: Registered
    options: Any
    how: str


@dataclass(frozen=True)
class _Solution:
    requirements: Requirements
    choices: dict[str, Choice]
    refusals: tuple[Refusal, ...]


def _solve(
    kinds: tuple[str, ...], needs: Requirements, candidates: Mapping[str, list[_Candidate]]
) -> _Solution | tuple[Refusal, ...]:
    """The first choice for `kinds` that works, or a refusal of each candidate for the first kind.

    `needs` is what the job and the kinds decided before require.
    """
    if not kinds:
        return _Solution(needs, {}, ())
    refusals: list[Refusal] = []
    for candidate in candidates[kinds[0]]:
        registered = candidate.registered
        implied = _implied(registered.backend, needs, candidate.options)
        if isinstance(implied, list):
            refusals.append(Refusal(registered, tuple(implied)))
            continue
        found = _solve(kinds[1:], implied, candidates)
        if isinstance(found, _Solution):
            choice = Choice(registered, candidate.options, candidate.how)
            choices = {kinds[0]: choice, **found.choices}
            return _Solution(found.requirements, choices, (*refusals, *found.refusals))
        reason = f"no {kinds[1]} fits with it: {', '.join(map(str, found))}"
        refusals.append(Refusal(registered, (reason,), found))
    return tuple(refusals)


def _implied(backend: Backend, needs: Requirements, options: Any) -> Requirements | list[str]:
    """What `backend` demands of the kinds decided later, or the reasons against it."""
    if reasons := judge(backend, needs, options):
        return reasons
    try:
        implied = backend.imply(needs, options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin must not break its host
        return [f"its own imply() raised {type(error).__name__}: {error}"]
    if isinstance(implied, Requirements):
        return implied
    return [f"its own imply() returned {implied!r} where Requirements were due"]


def judge(backend: Backend, needs: Requirements, options: Any) -> list[str]:
    """Every reason against `backend` for this job. One whose check breaks is refused with it."""
    return [*_ask(backend.available), *_ask(backend.refuse, needs, options)]


def _ask(check: Callable[..., list[str]], *arguments: Any) -> list[str]:
    try:
        reasons: Any = check(*arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin must not break its host
        return [f"its own {check.__name__}() raised {type(error).__name__}: {error}"]
    if isinstance(reasons, list | tuple) and all(isinstance(r, str) for r in reasons):
        return list(reasons)
    return [f"its own {check.__name__}() returned {reasons!r} where a list of reasons was due"]


def decide(registry: Registry, needs: Requirements, selections: Mapping[str, Quantizable]) -> Plan:
    """Choose one backend per kind. Raises SelectionError, OptionError or PlanError.

    A kind that `selections` leaves out is "auto". A named backend is never swapped; "auto" tries
    backends by rank; a list is tried in its order.
    Plugins that are missing from the choice are logged.
    """
    registry.warn()
    selections = dict.fromkeys(ORDER, AUTO) | dict(selections)
    candidates = {
        kind: list(_candidates(registry, kind, selections[kind], needs)) for kind in ORDER
    }
    found = _solve(ORDER, needs, candidates)
    if not isinstance(found, _Solution):
        raise PlanError(_failure(found, registry, needs, candidates, selections))
    plan = Plan(found.requirements, found.choices, found.refusals)
    for choice in plan.choices.values():
        if choice.how == AUTO and choice.backend.auto_notice:
            logger.warning("auto chose %s: %s", choice.registered, choice.backend.auto_notice)
        elif choice.how != "named":
            logger.info("%s chose %s", choice.how, choice.registered)
    if needs.experts_implementation:
        logger.info("experts run as %s", _experts(needs))
    for refusal in plan.refusals:
        logger.info("passed over %s: %s", refusal.registered, "; ".join(refusal.reasons))
    return plan


def _candidates(
    registry: Registry, kind: str, value: Any, needs: Requirements
) -> Iterator[_Candidate]:
    if kind == "quantizer" and hasattr(value, "quant_method"):
        yield _reader(registry, value, needs)
        return
    parsed = parse_all(value)
    how = "named" if len(parsed) == 1 else "fallback"
    for item in parsed:
        if isinstance(item, Selection):
            registered = registry.find(kind, item)
            owner = f"{kind} {registered.name!r}"
            options = make_options(registered.backend.options, item.arguments, owner)
            yield _Candidate(registered, options, how)
        else:
            yield from _automatic(registry, kind, needs)


def _reader(registry: Registry, config: Any, needs: Requirements) -> _Candidate:
    """The quantizer that a transformers config object belongs to."""
    stored = config.to_dict()
    for candidate in _automatic(registry, "quantizer", replace(needs, stored=stored)):
        if candidate.registered.backend.reads(stored):  # type: ignore[attr-defined]
            return _Candidate(candidate.registered, GivenConfig(config), "named")
    raise PlanError(
        f"no quantizer backend takes a {type(config).__name__} (method {method(stored)}); see "
        "`jackfield plugins` for those that there are"
    )


def _automatic(registry: Registry, kind: str, needs: Requirements) -> Iterator[_Candidate]:
    ranks = [(_rank(r, needs), r) for r in registry.of_kind(kind)]
    for _, r in sorted(
        ((rank, r) for rank, r in ranks if rank is not None), key=lambda pair: -pair[0]
    ):
        yield _Candidate(r, make_options(r.backend.options, {}, r.name), AUTO)


def _rank(registered: Registered, needs: Requirements) -> int | None:
    """Its rank for this job; None, only by name, and a warning, where its own code breaks."""
    try:
        rank: Any = registered.backend.rank(needs)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin must not break its host
        rank = f"an error, {type(error).__name__}: {error}"
    if type(rank) in (int, type(None)):
        return rank  # type: ignore[no-any-return]
    logger.warning("auto passes over %s: its own rank() gave %s", registered, rank)
    return None


def _failure(
    refusals: tuple[Refusal, ...],
    registry: Registry,
    needs: Requirements,
    candidates: Mapping[str, list[_Candidate]],
    selections: Mapping[str, Quantizable],
) -> str:
    """One line: what was asked, every reason against it, and what would be accepted."""
    asked = {kind: f"{ARGUMENTS[kind]}={_shown(selections[kind])}" for kind in ORDER}
    if empty := [kind for kind in ORDER if not candidates[kind]]:
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
    registry: Registry, kind: str, needs: Requirements, candidates: Mapping[str, list[_Candidate]]
) -> str:
    """Which backends of `kind` would make a plan with all else as it was asked for."""
    fitting = []
    for registered in registry.of_kind(kind):
        try:
            options = make_options(registered.backend.options, {}, registered.name)
        except JackfieldError:  # it needs an option, which we cannot know
            continue
        instead = {**candidates, kind: [_Candidate(registered, options, "named")]}
        if isinstance(_solve(ORDER, needs, instead), _Solution):
            fitting.append(registry.address(registered))
    return f"use {' or '.join(map(repr, fitting))}" if fitting else f"no other {kind} can either"


def plan(
    model: str | PreTrainedModel | PreTrainedConfig,
    *,
    attn_implementation: Selectable = AUTO,
    cache_implementation: Selectable = AUTO,
    quantization: Quantizable = AUTO,
    decoding: Selectable = AUTO,
    scheduler: Selectable = AUTO,
    compile: Selectable = AUTO,
    dtype: str = AUTO,
    device_map: str = AUTO,
    revision: str | None = None,
    deterministic: bool = False,
) -> Plan:
    """Decide, without loading a weight, what `jackfield.load` would run with these arguments.

    `model` is a hub id, a folder, "demo", a config, or a live model. Raises the errors that
    `load` would raise.
    """
    from jackfield.bridge.requirements import requirements_of
    from jackfield.bridge.source import find
    from jackfield.discovery import registry

    source = find(model, revision)
    needs = requirements_of(source, dtype=dtype, device=device_map, deterministic=deterministic)
    selections = {
        "attention": attn_implementation,
        "cache": cache_implementation,
        "compiler": compile,
        "decoding": decoding,
        "quantizer": quantization,
        "scheduler": scheduler,
    }
    return decide(registry(), needs, selections)
