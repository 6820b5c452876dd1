"""From selections to a plan: one backend per kind that fit together, or a PlanError."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jackfield.contracts import Requirements
from jackfield.errors import PlanError, SelectionError
from jackfield.planning.candidates import Candidates
from jackfield.planning.fused import chosen_kernels, is_traceable
from jackfield.planning.keywords import selected
from jackfield.planning.planning import Plan
from jackfield.planning.solving import ORDER, Solution, failure, solve
from jackfield.planning.strategies import chosen_beside, implied, offered, split
from jackfield.registry.backends import Choice, Registry
from jackfield.spelling import AUTO

logger = logging.getLogger("jackfield")


def decide(registry: Registry, needs: Requirements, selections: Mapping[str, Any]) -> Plan:
    """Choose one backend per kind. Raises SelectionError, OptionError or PlanError.

    A kind that `selections` leaves out is "auto". A named backend is never swapped; "auto" tries
    backends by rank; a list is tried in its order.
    Plugins that are missing from the choice are logged.
    """
    registry.warn()
    if needs.varies:
        raise PlanError(needs.varies)
    selections = selected(selections, registry)
    if not needs.attends and selections.get("attention", AUTO) != AUTO:
        raise PlanError(
            f"attn_implementation={selections['attention']!r} would never be called: no layer of "
            f"{needs.architecture} attends, each keeps a state; drop it"
        )
    kernels = selections.pop("kernel", AUTO)
    default, first, others = split(selections.get("decoding", AUTO))
    beside = chosen_beside(registry, needs, others)
    needs = implied(needs, beside)
    selections = _plain_selections({**selections, "decoding": first})
    plan = _solved(registry, needs, selections)
    chosen = selections["compiler"] == AUTO and plan.requirements.compiled
    try:
        found = chosen_kernels(registry, plan.requirements, kernels)
    except PlanError:
        if not chosen:
            raise
        found = None
    inside = plan.requirements.traced and any(
        is_traceable(one.registered) and one.how != AUTO for one in found or ()
    )
    if found is None or (chosen and inside):
        # Layers that are called one by one can do without what `auto` compiles, and no graph that
        # it finds on disk has a kernel in it.
        plan = _solved(registry, needs, {**selections, "compiler": "none"})
        plain = replace(plan["compiler"], how=AUTO)
        plan = replace(plan, choices={**plan.choices, "compiler": plain})
        found = chosen_kernels(registry, plan.requirements, kernels)
    plan = replace(
        plan,
        decodings=offered(registry, plan.requirements, plan["decoding"], default, beside),
        kernels=found,
    )
    for choice in plan.choices.values():
        notice = _notice(plan, choice)
        if notice:
            logger.warning("auto chose %s: %s", choice.registered, notice)
        elif choice.how != "named":
            logger.info("%s chose %s", choice.how, choice.registered)
    if plan.experts:
        logger.info("experts run as %s", plan.experts)
    for refusal in plan.refusals:
        what = "would be faster" if refusal in plan.faster else "passed over"
        logger.info("%s %s: %s", what, refusal.registered, "; ".join(refusal.reasons))
    return plan


def _solved(registry: Registry, needs: Requirements, selections: Mapping[str, Any]) -> Plan:
    """One backend a kind. Raises PlanError."""
    candidates = {kind: Candidates(registry, kind, selections[kind], needs) for kind in ORDER}
    found = solve(ORDER, needs, candidates)
    if not isinstance(found, Solution):
        raise PlanError(failure(found, registry, needs, candidates, selections))
    return Plan(found.requirements, found.choices, found.refusals)


def _notice(plan: Plan, choice: Choice) -> str | None:
    """What a user has to know of a choice of `auto`, and what is better, with what it lacks."""
    if choice.how != AUTO:
        return None
    notice = choice.registered.ask("notice", plan.requirements)
    if notice and choice is plan["attention"] and plan.faster:
        notice += f"; faster, and not to be had: {', '.join(map(str, plan.faster))}"
    return notice  # type: ignore[no-any-return]


def _plain_selections(given: Mapping[str, Any]) -> dict[str, Any]:
    """One selection a kind, "auto" where none is given."""
    if stray := [kind for kind, value in given.items() if isinstance(value, Mapping)]:
        raise SelectionError(f"only decodings are offered by name, not one {stray[0]} of several")
    return {kind: given.get(kind, AUTO) for kind in ORDER}
