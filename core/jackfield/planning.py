"""From selections to a plan: one backend per kind, decided before a weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.adapter import Adapter
from jackfield.candidates import Candidate, candidates_of
from jackfield.contracts import Backend, GivenConfig, Requirements
from jackfield.errors import JackfieldError, PlanError, SelectionError
from jackfield.fused import chosen_kernels
from jackfield.memory import CacheMemory, free_bytes
from jackfield.placement import DeviceMap, Placement
from jackfield.registry import Registered, Registry
from jackfield.selection import (
    AUTO,
    Quantizable,
    Selectable,
    make_options,
)
from jackfield.strategies import Strategies, chosen_beside, implied, offered, split

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from jackfield.assistance import Model

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
    "kernel": "kernels",
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
    """One backend per kind that fit together, with the reasons against the rest.

    `placement` says where weights go, `adapter` what is on top of them, None where nothing is.
    `decodings` are the strategies that requests can choose by name, the default first; `assistant`
    is the plan of their draft model. `kernels` stand in for layers.
    """

    requirements: Requirements
    choices: Mapping[str, Choice]
    refusals: tuple[Refusal, ...] = ()
    placement: Placement | None = None
    adapter: Adapter | None = None
    decodings: Mapping[str, Choice] = field(default_factory=dict)
    assistant: Plan | None = None
    kernels: tuple[Choice, ...] = ()

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
        where = self.placement
        if available is None and where is not None and len(where.execution_devices) > 1:
            return None  # each layer's are where it computes
        device = where.device if where else needs.device
        if available is None and (free := free_bytes(device)) is not None:
            available = max(0, free - self._loading(device))
        if not told or available is None:
            return None
        return CacheMemory(available, needs.context_length, request_bytes)

    def _loading(self, device: str | None) -> int:
        """The bytes of weights that are still to come to a device."""
        if self.placement is None or self.requirements.live:
            return self.requirements.weight_bytes
        return self.placement.sizes.get(device or "", 0)

    def to_dict(self) -> dict[str, Any]:
        needs, memory = self.requirements, self.memory()
        return {
            "architecture": needs.architecture,
            "dtype": needs.dtype,
            "device": needs.device,
            "layout": needs.layout,
            "features": dict(needs.features),
            "experts_implementation": needs.experts_implementation,
            "placement": self.placement.to_dict() if self.placement else None,
            "adapter": self.adapter.to_dict() if self.adapter else None,
            "memory": memory.to_dict() if memory else None,
            "chosen": {kind: choice.to_dict() for kind, choice in self.choices.items()},
            "decodings": {name: choice.to_dict() for name, choice in self.decodings.items()},
            "assistant": self.assistant.to_dict() if self.assistant else None,
            "kernels": [choice.to_dict() for choice in self.kernels],
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
        if self.placement:
            lines.append(f"  weights: {self.placement}")
        if self.adapter:
            lines.append(f"  adapter: {self.adapter}")
        for choice in self.kernels:
            r = choice.registered
            lines.append(f"  kernel: {r.name} ({choice.how}), {r.distribution} {r.version}")
        if len(self.decodings) > 1:
            lines.append(f"  decodings that a request can choose: {', '.join(self.decodings)}")
        if memory := self.memory():
            lines.append(f"  memory for keys and values: {memory}")
        lines += [
            f"  passed over: {r.registered.kind} {r.registered.name}: {'; '.join(r.reasons)}"
            for r in self.refusals
        ]
        if self.assistant is not None:
            lines += [f"  assistant: {line.strip()}" for line in str(self.assistant).splitlines()]
        return "\n".join(lines)


def _experts(needs: Requirements) -> str:
    why = needs.no_grouped_experts
    return f"{needs.experts_implementation}, since transformers' grouped product {why}"


@dataclass(frozen=True)
class _Solution:
    requirements: Requirements
    choices: dict[str, Choice]
    refusals: tuple[Refusal, ...]


def _solve(
    kinds: tuple[str, ...], needs: Requirements, candidates: Mapping[str, list[Candidate]]
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


def decide(registry: Registry, needs: Requirements, selections: Mapping[str, Any]) -> Plan:
    """Choose one backend per kind. Raises SelectionError, OptionError or PlanError.

    A kind that `selections` leaves out is "auto". A named backend is never swapped; "auto" tries
    backends by rank; a list is tried in its order.
    Plugins that are missing from the choice are logged.
    """
    registry.warn()
    selections = dict(selections)
    kernels = selections.pop("kernel", AUTO)
    default, first, others = split(selections.get("decoding", AUTO))
    beside = chosen_beside(registry, needs, others)
    needs = implied(needs, beside)
    selections = _plain_selections({**selections, "decoding": first})
    candidates = {
        kind: list(candidates_of(registry, kind, selections[kind], needs)) for kind in ORDER
    }
    found = _solve(ORDER, needs, candidates)
    if not isinstance(found, _Solution):
        raise PlanError(_failure(found, registry, needs, candidates, selections))
    plan = Plan(found.requirements, found.choices, found.refusals)
    plan = replace(
        plan,
        decodings=offered(registry, plan, default, beside),
        kernels=chosen_kernels(registry, plan.requirements, kernels),
    )
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


def _plain_selections(given: Mapping[str, Any]) -> dict[str, Any]:
    """One selection a kind, "auto" where none is given."""
    if stray := [kind for kind, value in given.items() if isinstance(value, Mapping)]:
        raise SelectionError(f"only decodings are offered by name, not one {stray[0]} of several")
    return {kind: given.get(kind, AUTO) for kind in ORDER}


def _failure(
    refusals: tuple[Refusal, ...],
    registry: Registry,
    needs: Requirements,
    candidates: Mapping[str, list[Candidate]],
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
    registry: Registry, kind: str, needs: Requirements, candidates: Mapping[str, list[Candidate]]
) -> str:
    """Which backends of `kind` would make a plan with all else as it was asked for."""
    fitting = []
    for registered in registry.of_kind(kind):
        try:
            options = make_options(registered.backend.options, {}, registered.name)
        except JackfieldError:  # it needs an option, which we cannot know
            continue
        instead = {**candidates, kind: [Candidate(registered, options, "named")]}
        if isinstance(_solve(ORDER, needs, instead), _Solution):
            fitting.append(registry.address(registered))
    return f"use {' or '.join(map(repr, fitting))}" if fitting else f"no other {kind} can either"


def plan(
    model: str | PreTrainedModel | PreTrainedConfig,
    *,
    attn_implementation: Selectable = AUTO,
    cache_implementation: Selectable = AUTO,
    quantization: Quantizable = AUTO,
    decoding: Strategies = AUTO,
    assistant_model: Model | None = None,
    assistant: Mapping[str, Any] | None = None,
    scheduler: Selectable = AUTO,
    compile: Selectable = AUTO,  # noqa: A002 - what it is called in transformers, too
    kernels: Selectable = AUTO,
    dtype: str = AUTO,
    device_map: DeviceMap = AUTO,
    max_memory: Mapping[str | int, str | int] | None = None,
    offload_folder: str | Path | None = None,
    adapter: str | Path | None = None,
    merge_adapter: bool = False,
    revision: str | None = None,
    deterministic: bool = False,
) -> Plan:
    """Decide, without loading a weight, what `jackfield.load` would run with these arguments.

    `model` is a hub id, a folder, "demo", a config, or a live model. Raises the errors that
    `load` would raise.
    """
    from jackfield.assistance import find_assistant
    from jackfield.deciding import understand
    from jackfield.discovery import registry

    job = understand(
        model,
        dtype=dtype,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        adapter=adapter,
        merge_adapter=merge_adapter,
        revision=revision,
        deterministic=deterministic,
    )
    selections: dict[str, Any] = {
        "attention": attn_implementation,
        "cache": cache_implementation,
        "compiler": compile,
        "decoding": decoding,
        "kernel": kernels,
        "quantizer": quantization,
        "scheduler": scheduler,
    }
    plan = job.decide(registry(), selections)
    helper = find_assistant(plan, assistant_model, assistant, device_map)
    return plan if helper is None else replace(plan, assistant=helper.plan)
