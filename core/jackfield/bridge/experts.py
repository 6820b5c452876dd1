"""Mixture-of-experts layers in a dtype that transformers' default way of computing them lacks."""

from __future__ import annotations

from transformers import PreTrainedModel

from jackfield.bridge.source import config_tree
from jackfield.contracts.requirements import Requirements
from jackfield.errors import PlanError


def experts_implementation(dtype: str) -> str | None:
    """What experts need in place of transformers' default, a grouped product without float64."""
    return "eager" if dtype == "float64" else None


def experts_of(model: PreTrainedModel, dtype: str) -> str | None:
    """The same, where `model` has experts that can be computed in several ways."""
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    has_experts = any(part._can_set_experts_implementation() for part in parts)
    return experts_implementation(dtype) if has_experts else None


def check_experts(model: PreTrainedModel, needs: Requirements) -> None:
    """Raise PlanError for a live model, used as it is, that would fail in its first step."""
    wanted = needs.experts_implementation
    chosen = [part._experts_implementation for part in config_tree(model.config)]
    if wanted is not None and "grouped_mm" in chosen:
        raise PlanError(
            f"{needs.architecture} is in {needs.dtype}, which the grouped product of its experts "
            f"does not take; call model.set_experts_implementation({wanted!r}) first"
        )
