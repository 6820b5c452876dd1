"""A draft model that is the model's own first layers: checked and planned before weights are read.

Early exit, or self-speculation (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from jackfield.bridge.first_layers import by_themselves
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.placement import Placement
from jackfield.bridge.requirements import describe, with_trial
from jackfield.contracts import Requirements
from jackfield.errors import JackfieldError, UsageError
from jackfield.planning.deciding import Job
from jackfield.planning.planning import Plan
from jackfield.planning.selecting import decide
from jackfield.registry.discovery import registry

#: What `assistant={…}` may hold, and the kind that it selects: all else is the model's.
KEYS = {"attn_implementation": "attention", "cache_implementation": "cache"}
#: Kinds that the draft model has as the model was asked to have them.
_AS_THE_MODEL = ("attention", "cache", "compiler")


@dataclass(frozen=True)
class EarlyExit:
    """The first `layers` layers of a model as its draft model, planned."""

    plan: Plan
    layers: int


def planned_exit(
    plan: Plan,
    job: Job,
    asked_of_the_model: Mapping[str, Any],
    asked_of_the_draft: Mapping[str, Any],
    layers: int,
) -> EarlyExit:
    """Plan the first `layers` layers of `job` beside its `plan`. Raises what a plan raises.

    Both are asked for by selections: the model's by kind, those of `assistant={…}` by argument.
    """
    asked = f"assistant_early_exit={layers}"
    _check(plan, job, asked, layers)
    selections = {kind: asked_of_the_model[kind] for kind in _AS_THE_MODEL}
    selections |= _own(asked_of_the_draft)
    try:
        needs = _needs(plan, job, layers)
        found = decide(registry(), needs, selections)
    except JackfieldError as error:
        raise type(error)(f"{asked}: {error}") from error
    device = plan.device or "cpu"
    found = replace(
        found,
        choices={**found.choices, "quantizer": plan["quantizer"]},
        placement=Placement(device, {"": device}, {}),
        kernels=(),  # those of the model are in its layers
        early_exit=layers,
    )
    return EarlyExit(found, layers)


def _check(plan: Plan, job: Job, asked: str, layers: int) -> None:
    """Raise UsageError where a model's first layers cannot be a draft model of its own."""
    needs = plan.requirements
    most = len(needs.layer_types) + len(needs.shared_layers) - 1
    if job.shard is not None:
        raise UsageError(
            f"{asked} does not go with tp_size={job.shard.size}: a draft model is computed by one "
            "process, and its layers are shared by all; give an assistant_model instead"
        )
    if plan.placement is not None and plan.placement.spread:
        raise UsageError(
            f"{asked} does not go with weights in several places, which are brought to where the "
            "whole model computes; name one device, or give an assistant_model instead"
        )
    if layers > most:
        has = f"{job.needs.architecture} has {most + 1} layer{'s' if most else ''}"
        do = f"give 1 to {most}" if most else "drop it"
        raise UsageError(f"{asked} leaves no layer out: {has}; {do}")


def _own(how: Mapping[str, Any]) -> dict[str, Any]:
    """What `assistant` selects for the draft model. Raises UsageError for what is the model's."""
    for key in how:
        if key not in KEYS:
            raise UsageError(
                f"assistant has the key {key!r}, and with assistant_early_exit the draft model is "
                f"the model itself; only {' and '.join(KEYS)} can be others: drop it"
            )
    return {KEYS[key]: value for key, value in how.items()}


def _needs(plan: Plan, job: Job, layers: int) -> Requirements:
    """What the first layers need of their backends; no weight is to be read for them."""
    source, needs = job.source, plan.requirements
    whole = meta_model(source.config, None if source.live is None else type(source.live))
    alone = by_themselves(whole, layers)
    found = describe(alone, dtype=needs.dtype, device=torch.device(plan.device or "cpu"))
    return replace(
        with_trial(alone, found),
        weights=(),
        weight_bytes=0,
        stored=None,
        live=True,
        elsewhere=needs.elsewhere,
        experts_implementation=needs.experts_implementation,
        rollback=True,
    )
