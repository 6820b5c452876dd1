"""Refuses a device that is too small for the weights, and says what would fit."""

from __future__ import annotations

from dataclasses import replace

from jackfield.bridge.placement import Placement
from jackfield.contracts.requirements import BYTES
from jackfield.errors import JackfieldError, PlanError
from jackfield.planning.device_map import Asked
from jackfield.planning.placing import too_large
from jackfield.planning.planning import Plan
from jackfield.planning.solving import reasons_against
from jackfield.registry.backends import Registered, Registry
from jackfield.units import in_units


def check_size(registry: Registry, plan: Plan, asked: Asked, where: Placement) -> None:
    """Refuse one device that is too small: nothing is made smaller unless the caller says so."""
    needs = plan.requirements
    bound = too_large(where.device, needs.weight_bytes, asked)
    if bound is None:
        return
    given = "max_memory gives it" if asked.max_memory is not None else "free there are"
    more = "device_map='auto'" if needs.tp_size == 1 else "a larger tp_size"
    would = [*_dtypes(plan, bound), *_quantizers(registry, plan, bound), more]
    raise PlanError(
        f"the weights of {needs.architecture} take {in_units(needs.weight_bytes)} in {needs.dtype}"
        f" and do not fit on {where.device}: {given} {in_units(bound)}; what would fit: "
        f"{', '.join(would)}"
    )


def _dtypes(plan: Plan, bound: int) -> list[str]:
    """Smaller dtypes of the same weights that fit."""
    needs, choice = plan.requirements, plan["quantizer"]
    found = []
    for dtype in ("float32", "bfloat16"):
        if BYTES[dtype] < BYTES[needs.dtype] and needs.stored is None:
            smaller = replace(needs, dtype=dtype)
            size = choice.registered.size("weight_bytes", smaller, choice.options)
            if size is not None and size <= bound:
                found.append(f"dtype={dtype!r} ({in_units(size)})")
    return found


def _quantizers(registry: Registry, plan: Plan, bound: int) -> list[str]:
    """Quantizers that run here and make the weights fit."""
    found = []
    for registered in registry.of_kind("quantizer"):
        size = _size_with(registered, plan)
        if size is not None and size <= bound:
            found.append(f"quantization={registry.address(registered)!r} ({in_units(size)})")
    return found


def _size_with(registered: Registered, plan: Plan) -> int | None:
    if registered is plan["quantizer"].registered:
        return None
    try:
        options = registered.options()
    except JackfieldError:  # it needs an option, which we cannot know
        return None
    if reasons_against(registered, plan.requirements, options):
        return None
    return registered.size("weight_bytes", plan.requirements, options)
