"""`jackfield explain`: the plan for a model, and the verdict on every backend. Loads no weights."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from jackfield.cli.options import Backends, JsonOption, ModelArgument
from jackfield.cli.output import console, listing, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jackfield.contracts import Requirements
    from jackfield.errors import PlanError
    from jackfield.planning.deciding import Job
    from jackfield.planning.planning import Plan
    from jackfield.registry.backends import Choice, Registered, Registry
    from jackfield.spelling import Selectable

COLORS = {"chosen": "green", "possible": "default", "refused": "red"}


@dataclass(frozen=True)
class Verdict:
    """One backend: chosen, possible with the rest of the command line as it is, or refused."""

    kind: str
    name: str
    distribution: str
    version: str
    verdict: str
    how: str | None = None
    reasons: tuple[str, ...] = ()


def explain(backends: Backends, model: ModelArgument = "demo", json: JsonOption = False) -> None:
    """Say which backends would run a model, and why not the others.

    Reads the model's config but no weights. "possible" is a backend that would be accepted in place
    of the chosen one, all other flags being the same.

    Example: jackfield explain demo --attention eager
    """
    from jackfield.api import OF_A_PLAN
    from jackfield.errors import PlanError
    from jackfield.planning.assistance import find_assistant
    from jackfield.planning.deciding import spread_over, understand
    from jackfield.planning.solving import ARGUMENTS
    from jackfield.planning.wording import in_our_words
    from jackfield.registry.discovery import registry
    from jackfield.spelling import AUTO

    words = in_our_words(backends.arguments(), OF_A_PLAN, "jackfield explain")
    selections = {kind: words.get(name, AUTO) for kind, name in ARGUMENTS.items()}
    job = understand(model, **backends.job())
    needs = job.needs
    plan, error = None, None
    try:
        plan = job.decide(registry(), selections)
        draft = find_assistant(plan, words.get("assistant_model"), None, job.asked.device_map)
        plan = plan if draft is None else replace(plan, assistant=draft.plan)
        if plan.placement and plan.placement.spread:
            needs = spread_over(needs, plan.placement)
    except PlanError as refused:
        error = refused
    verdicts = list(_Judge(registry(), job, selections, plan).verdicts(needs))
    if json:
        _print_json(plan, error, verdicts)
    else:
        _print(plan.requirements if plan else needs, plan, verdicts)
    if error is not None:
        raise error


@dataclass(frozen=True)
class _Judge:
    """Answers for one backend after another what the plan says, or would say."""

    registry: Registry
    job: Job
    selections: dict[str, Selectable]
    plan: Plan | None

    def verdicts(self, needs: Requirements) -> Iterator[Verdict]:
        """Every backend of every kind, against what the kinds decided before it imply."""
        from jackfield.planning.solving import ORDER

        for kind in (*ORDER, "kernel"):
            for registered in self.registry.of_kind(kind):
                yield self._verdict(registered, needs)
            if self.plan is not None and kind in ORDER:
                choice = self.plan[kind]
                needs = choice.registered.ask("imply", needs, choice.options)

    def _verdict(self, registered: Registered, needs: Requirements) -> Verdict:
        kind = registered.kind
        origin = (kind, registered.name, registered.distribution, registered.version)
        for choice in self._chosen(kind):
            if choice.registered is registered:
                return Verdict(*origin, "chosen", choice.how)
        reasons = tuple(self._reasons(registered, needs))
        return Verdict(*origin, "refused" if reasons else "possible", None, reasons)

    def _chosen(self, kind: str) -> Sequence[Choice]:
        if self.plan is None:
            return ()
        return self.plan.kernels if kind == "kernel" else (self.plan[kind],)

    def _reasons(self, registered: Registered, needs: Requirements) -> Sequence[str]:
        """Why it cannot stand in: its own reasons, or that nothing fits with it."""
        from jackfield.errors import JackfieldError, PlanError
        from jackfield.planning.planning import decide
        from jackfield.planning.solving import judge

        for refusal in self.plan.refusals if self.plan is not None else ():
            if refusal.registered is registered:
                return refusal.reasons
        try:
            options = registered.options()
        except JackfieldError as error:
            return [str(error)]
        if reasons := judge(registered, needs, options):
            return reasons
        named = f"plugin:{registered.distribution}/{registered.name}"
        try:
            plan = decide(self.registry, needs, {**self.selections, registered.kind: named})
            self.job.check_layers(plan)
        except PlanError as error:
            return [str(error)]
        return []


def _print_json(plan: Plan | None, error: PlanError | None, verdicts: list[Verdict]) -> None:
    print_json(
        {
            "plan": plan.to_dict() if plan else None,
            "error": str(error) if error else None,
            "backends": [asdict(verdict) for verdict in verdicts],
        }
    )


def _print(needs: Requirements, plan: Plan | None, verdicts: list[Verdict]) -> None:
    from rich.text import Text

    out = console()
    out.print(f"{needs.architecture}, {needs.dtype} on {needs.device}, {needs.layout} layout")
    for name, evidence in needs.features.items():
        out.print(f"  needs {name}: {evidence}")
    if plan is not None and plan.placement:
        out.print(f"  weights: {plan.placement}")
    if plan is not None and plan.adapter:
        out.print(f"  adapter: {plan.adapter}")
    for refusal in plan.faster if plan is not None else ():
        out.print(f"  would be faster: {refusal.registered.kind} {refusal}")
    if plan is not None and (memory := plan.memory()):
        out.print(f"  memory for keys and values: {memory}")
    reasons = {reason: n for n, reason in enumerate(_reasons(verdicts), 1)}
    rows = [(("kind", "backend", "verdict", "distribution"), ["why"])] + [
        ((v.kind, v.name, v.verdict, f"{v.distribution} {v.version}"), [_why(v, reasons)])
        for v in verdicts
    ]
    for row, line in listing(rows, out.width):
        verdict = verdicts[row - 1].verdict if row else ""
        text = Text(line, style="" if row else "bold")
        text.highlight_words([verdict] if verdict else [], COLORS.get(verdict, ""))
        out.print(text, soft_wrap=True)
    if reasons:
        out.print("why not", style="bold")
    for reason, number in reasons.items():
        lines = textwrap.wrap(
            reason,
            out.width,
            initial_indent=f"{number:>3}  ",
            subsequent_indent=" " * 5,
            break_on_hyphens=False,
        )
        out.print("\n".join(lines), soft_wrap=True)
    if plan is not None and plan.assistant is not None:
        out.print(f"assistant: {plan.assistant}")


def _reasons(verdicts: list[Verdict]) -> list[str]:
    """Each reason once, in the order in which they come."""
    return list(dict.fromkeys(reason for v in verdicts for reason in v.reasons))


def _why(verdict: Verdict, reasons: Mapping[str, int]) -> str:
    """How it was chosen, or the numbers of the reasons against it."""
    return verdict.how or ", ".join(str(reasons[reason]) for reason in verdict.reasons)
