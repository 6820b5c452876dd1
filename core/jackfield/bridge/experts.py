"""Mixture-of-experts layers, where transformers' default way of computing them does not do."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from jackfield.bridge.config_files import config_tree
from jackfield.contracts.requirements import Requirements
from jackfield.errors import PlanError


def experts_of(model: PreTrainedModel, dtype: str, *, batch_invariant: bool = False) -> str | None:
    """What experts need in place of transformers' default, a grouped product; None: nothing.

    It takes no float64, and its sums depend on how many tokens there are.
    """
    unfit = dtype == "float64" or batch_invariant
    return "eager" if unfit and _has_experts(model) else None


def _has_experts(model: PreTrainedModel) -> bool:
    """Whether some are there that look up how they are computed; of Gemma 4 few sizes have any."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    looked_up = any(part._can_set_experts_implementation() for part in parts)
    # What transformers' `use_experts_implementation` gives the modules of a class.
    return looked_up and any(hasattr(module, "is_transposed") for module in model.modules())


def with_experts(model: PreTrainedModel, needs: Requirements) -> Requirements:
    """The requirements of a live model, whose experts are computed as it was told.

    Raises PlanError where they would fail in its first step.
    """
    wanted = needs.experts_implementation
    chosen = [part._experts_implementation for part in config_tree(model.config)]
    if wanted is not None and "grouped_mm" in chosen:
        raise PlanError(
            f"{needs.architecture} computes its experts in a grouped product, which "
            f"{needs.no_grouped_experts}; call model.set_experts_implementation({wanted!r}) first"
        )
    if wanted is None and "eager" in chosen and _has_experts(model):
        return replace(needs, experts_implementation="eager")
    return needs
