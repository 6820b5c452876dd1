"""`jackfield explain`: the plan for a model, and the verdict on every backend. Loads no weights."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from jackfield.cli.options import Backends, JsonOption, ModelArgument
from jackfield.cli.output import console, print_json, print_listing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jackfield.planning.verdicts import Explanation, Verdict


def explain(backends: Backends, model: ModelArgument = "demo", json: JsonOption = False) -> None:
    """Say which backends would run a model, and why not the others.

    Reads the model's config but no weights. "possible" is a backend that would be accepted in place
    of the chosen one, all other flags being the same.

    Example: jackfield explain demo --attention eager
    """
    from jackfield.planning import verdicts
    from jackfield.planning.keywords import in_our_words
    from jackfield.planning.profiles import taken
    from jackfield.planning.spec import PlanSpec
    from jackfield.requests.arguments import OF_A_PLAN

    words = in_our_words(backends.arguments(), OF_A_PLAN, "jackfield explain")
    found = verdicts.explain(model, PlanSpec(**taken(words, OF_A_PLAN)))
    if json:
        _print_json(found)
    else:
        _print(found)
    if found.error is not None:
        raise found.error


def _print_json(found: Explanation) -> None:
    print_json(
        {
            "plan": found.plan.to_dict() if found.plan else None,
            "error": str(found.error) if found.error else None,
            "backends": [asdict(verdict) for verdict in found.verdicts],
        }
    )


def _print(found: Explanation) -> None:
    out, needs, plan, verdicts = console(), found.requirements, found.plan, found.verdicts
    out.print(f"{needs.architecture}, {needs.dtype} on {needs.device}, {needs.layout} layout")
    for name, evidence in needs.features.items():
        out.print(f"  needs {name}: {evidence}")
    if needs.waits:
        out.print(f"  requests wait until a batch has ended: {needs.waits}")
    if found.profile is not None:
        names = ", ".join(found.profile.with_sizes.names) or "nothing"
        out.print(f"  {found.profile.origin}: {names}", soft_wrap=True)  # a path stays whole
    if plan is not None and plan.placement:
        out.print(f"  weights: {plan.placement}")
    if plan is not None and plan.shared:
        out.print(f"  {plan.shared}")
    if plan is not None and plan.adapter:
        out.print(f"  adapter: {plan.adapter}")
    if plan is not None and plan.recorded is not None:
        out.print(f"  recorded: {plan.recorded}")
    for refusal in plan.faster if plan is not None else ():
        out.print(f"  would be faster: {refusal.registered.kind} {refusal}")
    if plan is not None and (memory := plan.memory()):
        out.print(f"  memory for keys and values: {memory}")
    reasons = {reason: n for n, reason in enumerate(_reasons(verdicts), 1)}
    rows = [(("kind", "backend", "verdict", "distribution"), ["why"])] + [
        ((v.kind, v.name, v.verdict, f"{v.distribution} {v.version}"), [_why(v, reasons)])
        for v in verdicts
    ]
    print_listing(out, rows, [v.verdict for v in verdicts])
    if reasons:
        out.print("why not", style="bold")
    for reason, number in reasons.items():
        lines = textwrap.wrap(
            reason,
            out.width,
            initial_indent=f"{number:>3}  ",
            subsequent_indent=" " * 5,
            break_on_hyphens=False,
            break_long_words=False,
        )
        out.print("\n".join(lines), soft_wrap=True)
    if plan is not None and plan.assistant is not None:
        out.print(f"assistant: {plan.assistant}")


def _reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Each reason once, in the order in which they come."""
    return list(dict.fromkeys(reason for v in verdicts for reason in v.reasons))


def _why(verdict: Verdict, reasons: Mapping[str, int]) -> str:
    """How it was chosen, and with what, or the numbers of the reasons against it."""
    if verdict.how:
        return f"{verdict.how}, {verdict.options}" if verdict.options else verdict.how
    return ", ".join(str(reasons[reason]) for reason in verdict.reasons)
