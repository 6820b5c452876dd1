"""The verdict on every backend: chosen, possible instead, or refused, and why; for `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.contracts import Requirements
from jackfield.errors import JackfieldError, PlanError
from jackfield.planning.assistance import with_assistant
from jackfield.planning.deciding import Job, resolve_job, spread_over
from jackfield.planning.locking import check, opened
from jackfield.planning.planning import Plan
from jackfield.planning.profiles import Taken, check_architecture, compared, of_profile
from jackfield.planning.selecting import decide
from jackfield.planning.solving import ORDER, reasons_against
from jackfield.planning.spec import PlanSpec
from jackfield.registry.backends import Choice, Registered, Registry
from jackfield.registry.discovery import registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Verdict:
    """One backend: chosen, possible with all other arguments as they are, or refused.

    `options` of a chosen one are those that are not the usual ones, as a selection spells them.
    """

    kind: str
    name: str
    distribution: str
    version: str
    verdict: str
    how: str | None = None
    reasons: tuple[str, ...] = ()
    options: str = ""


@dataclass(frozen=True)
class Explanation:
    """A plan, or the error that there is none, and a verdict on each backend of every kind.

    `profile` is that which the caller named.
    """

    requirements: Requirements
    plan: Plan | None
    error: PlanError | None
    verdicts: tuple[Verdict, ...]
    profile: Taken | None = None


def explain(model: str | Path | PreTrainedModel | PreTrainedConfig, spec: PlanSpec) -> Explanation:
    """The plan for `model` with the reasons. Raises what `jackfield.plan` raises but PlanError."""
    with of_profile(spec.profile):
        spec, lock = opened(spec, registry())
        job = resolve_job(model, spec)
        check_architecture(spec.profile, job.needs.architecture)
    needs, plan, error = job.needs, None, None
    try:
        with of_profile(spec.profile):
            plan = job.decide(registry(), spec.selections)
            plan, _ = with_assistant(plan, job, spec)
        if lock is not None:
            check(plan, lock)
        plan = compared(spec.profile, plan, job.source.config)
        if plan.placement and plan.placement.spread:
            needs = spread_over(needs, plan.placement)
    except PlanError as refused:
        error = refused
    verdicts = tuple(_Verdicts(registry(), job, spec, plan).of_all(needs))
    needs = plan.requirements if plan else needs
    return Explanation(needs, plan, error, verdicts, spec.profile)


@dataclass(frozen=True)
class _Verdicts:
    """Answers for one backend after another what the plan says, or would say."""

    registry: Registry
    job: Job
    spec: PlanSpec
    plan: Plan | None

    def of_all(self, needs: Requirements) -> Iterator[Verdict]:
        """Every backend of every kind, against what the kinds decided before it imply."""
        for kind in (*ORDER, "kernel"):
            for registered in self.registry.of_kind(kind):
                yield self._of(registered, needs)
            if self.plan is not None and kind in ORDER:
                choice = self.plan[kind]
                needs = choice.registered.ask("imply", needs, choice.options)

    def _of(self, registered: Registered, needs: Requirements) -> Verdict:
        kind = registered.kind
        origin = (kind, registered.name, registered.distribution, registered.version)
        for choice in self._chosen(kind):
            if choice.registered is registered:
                return Verdict(*origin, "chosen", choice.how, options=choice.query)
        reasons = tuple(self._reasons(registered, needs))
        return Verdict(*origin, "refused" if reasons else "possible", None, reasons)

    def _chosen(self, kind: str) -> Sequence[Choice]:
        if self.plan is None:
            return ()
        return self.plan.kernels if kind == "kernel" else (self.plan[kind],)

    def _reasons(self, registered: Registered, needs: Requirements) -> Sequence[str]:
        """Why it cannot stand in: its own reasons, or that nothing fits with it."""
        for refusal in self.plan.refusals if self.plan is not None else ():
            if refusal.registered is registered:
                return refusal.reasons
        try:
            options = registered.options()
        except JackfieldError as error:
            return [str(error)]
        if reasons := reasons_against(registered, needs, options):
            return reasons
        named = f"plugin:{registered.distribution}/{registered.name}"
        selections = {**self.spec.selections, registered.kind: named}
        try:
            plan = decide(self.registry, needs, selections)
            self.job.with_layers(plan)
        except PlanError as error:
            return [str(error)]
        return []
