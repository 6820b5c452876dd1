"""What a backend does not declare must be refused: by itself, and when a job is planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jackfield.api import plan
from jackfield.contracts import Requirements
from jackfield.contracts.requirements import DEVICES, DTYPES
from jackfield.errors import JackfieldError, PlanError, shown
from jackfield.planning.solving import ARGUMENTS
from jackfield.testing.checks import WrongError
from jackfield.testing.subject import Subject


def undeclared(capabilities: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The dtypes and devices that are not declared: the name of each, and what a job asks."""
    for dtype in sorted(set(DTYPES) - capabilities.dtypes):
        yield dtype, {"dtype": dtype}
    for device in sorted(set(DEVICES) - capabilities.devices):
        yield device, {"device": device}


def refused(subject: Subject, plain: Requirements, **needs: Any) -> str:
    """Its reasons against a `plain` job that `needs` this too. Raises WrongError without any."""
    reasons = subject.registered.ask("refuse", replace(plain, **needs), subject.options)
    if not reasons:
        what = ", ".join(f"{name} {_words(value)}" for name, value in needs.items())
        raise WrongError(
            f"`refuse` accepts a job with {what}, which is not declared; extend what "
            "`super().refuse(...)` returns"
        )
    return shown("; ".join(map(str, reasons)), 300)


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else str(value)


def refused_in_a_plan(subject: Subject, config: Any, what: str, **arguments: Any) -> None:
    """Raise WrongError unless a plan for `what` refuses the backend by its name."""
    chosen: Any = {ARGUMENTS[subject.kind]: subject.selection, **arguments}
    try:
        plan(config, device_map=subject.device, **chosen)
    except PlanError as error:
        if subject.registered.name not in str(error):
            raise WrongError(
                f"a plan for {what} is refused, and not by its name: {error}"
            ) from None
    except JackfieldError as error:
        raise WrongError(f"a plan for {what} fails in another way: {error}") from None
    else:
        raise WrongError(f"a plan for {what} is accepted, which is not declared")
