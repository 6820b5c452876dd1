"""What a compiler cannot, or does not declare, must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jackfield.api import plan
from jackfield.testing.checks import Check
from jackfield.testing.models import config_of
from jackfield.testing.refusals import refused, undeclared
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """One for each; the backend itself is asked, with what a model would need."""
    can = subject.backend.capabilities
    for name, needs in undeclared(can):
        (what,) = needs
        yield _asked(subject, f"{what}s: {name}", f"{what}.{name}", **needs)
    if not can.batch_invariant:
        yield _asked(subject, "batch_invariant", "deterministic", batch_invariant=True)
    for feature in ("own_attention", "own_mask", "bidirectional_prefix", "position_bias"):
        needed = {"features": {feature: "a check"}}
        yield _asked(subject, "contract", f"feature.{feature}", **needed)
    yield _asked(subject, "contract", "linear_attention", layer_types=("linear_attention",))
    yield _asked(subject, "contract", "irregular", irregular="layers that share keys")
    yield _asked(subject, "contract", "branches", branches="a rope that follows the longest text")
    yield _asked(
        subject, "contract", "several_devices", execution_devices=("cpu",), offloaded=("disk",)
    )
    yield _asked(subject, "contract", "single_experts", experts_implementation="eager")


def _asked(subject: Subject, capability: str, name: str, **changes: Any) -> Check:
    def run(_: object) -> str:
        return refused(subject, plan(config_of("grouped_query")).requirements, **changes)

    return Check(f"refused.{name}", capability, run, refusal=True)
