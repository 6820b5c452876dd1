"""Which kernels replace a model's layers: all that are named, each checked by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.errors import PlanError, SelectionError
from jackfield.planning.solving import reasons_against
from jackfield.registry.backends import Choice
from jackfield.spelling import AUTO, Selectable, Selection, parse_all

if TYPE_CHECKING:
    from jackfield.contracts import Requirements
    from jackfield.registry.backends import Registry


def chosen_kernels(
    registry: Registry, needs: Requirements, value: Selectable
) -> tuple[Choice, ...]:
    """A choice for each kernel that `value` names; unlike other kinds, a list means all of it.

    "auto" names none: a layer of the model's own is always right. Raises SelectionError,
    OptionError, or PlanError where one refuses.
    """
    found = []
    for item in parse_all(value) if value != AUTO else []:
        if not isinstance(item, Selection):
            raise SelectionError("kernels='auto' is none, and goes with no other; name the kernels")
        registered = registry.find("kernel", item)
        options = registered.options(item.arguments)
        if reasons := reasons_against(registered, needs, options):
            raise PlanError(
                f"kernels={str(item)!r} cannot run {needs.architecture} here: "
                f"{'; '.join(reasons)}; drop it"
            )
        found.append(Choice(registered, options, "named"))
    return tuple(found)
