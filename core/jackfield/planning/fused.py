"""Which kernels replace a model's layers: all that are named, or those that `auto` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.errors import PlanError, SelectionError
from jackfield.planning.candidates import Candidates
from jackfield.planning.solving import reasons_against
from jackfield.registry.backends import Choice
from jackfield.spelling import AUTO, Selectable, Selection, parse_all

if TYPE_CHECKING:
    from jackfield.contracts import KernelCapabilities, Requirements
    from jackfield.registry.backends import Registered, Registry


#: The name of no kernel, where `auto` would take some.
NO_KERNEL = "none"


def is_traceable(registered: Registered) -> bool:
    """Whether a compiler may trace a kernel's functions."""
    can: KernelCapabilities = registered.backend.capabilities  # type: ignore[attr-defined]
    return can.traceable


def chosen_kernels(
    registry: Registry, needs: Requirements, value: Selectable
) -> tuple[Choice, ...]:
    """A choice for each kernel that `value` names; unlike other kinds, a list means all of it.

    Of "auto" all that have a rank for the job, and nothing against it; "none" is none. Raises
    SelectionError, OptionError, or PlanError where one refuses.
    """
    if value == AUTO:
        return _automatic(registry, needs)
    items = parse_all(value)
    if items == [Selection(NO_KERNEL)]:
        return ()
    found = []
    for item in items:
        if not isinstance(item, Selection):
            raise SelectionError("kernels='auto' goes with no other; name the kernels")
        registered = registry.find("kernel", item)
        options = registered.options(item.arguments)
        if reasons := reasons_against(registered, needs, options):
            raise PlanError(
                f"kernels={str(item)!r} cannot run {needs.architecture} here: "
                f"{'; '.join(reasons)}; drop it"
            )
        found.append(Choice(registered, options, "named"))
    return tuple(found)


def _automatic(registry: Registry, needs: Requirements) -> tuple[Choice, ...]:
    """Adapters change layers, and nobody asked for a kernel: then they stay the model's own."""
    if needs.adapter or needs.request_adapters:
        return ()
    ranked = Candidates(registry, "kernel", AUTO, needs).of(needs)
    return tuple(
        Choice(one.registered, one.options, AUTO)
        for one in ranked
        if not reasons_against(one.registered, needs, one.options)
    )
