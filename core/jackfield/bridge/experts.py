"""Mixture-of-experts layers, where transformers' default way of computing them does not do."""

from __future__ import annotations

from transformers import PreTrainedModel

from jackfield.bridge.source import config_tree
from jackfield.contracts.requirements import Requirements
from jackfield.errors import PlanError


def experts_implementation(dtype: str, *, batch_invariant: bool = False) -> str | None:
    """What experts need in place of transformers' default, a grouped product.

    It takes no float64, and its sums depend on how many tokens there are.
    """
    return "eager" if dtype == "float64" or batch_invariant else None


def experts_of(
    model: PreTrainedModel, dtype: str, *, live: bool, batch_invariant: bool = False
) -> str | None:
    """The same, where `model` has experts that can be computed in several ways.

    A `live` model may have been told by its owner to compute them one by one.
    """
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    parts = [part for part in parts if part._can_set_experts_implementation()]
    if not parts:
        return None
    if live and any(part.config._experts_implementation == "eager" for part in parts):
        return "eager"
    return experts_implementation(dtype, batch_invariant=batch_invariant)


def check_experts(model: PreTrainedModel, needs: Requirements) -> None:
    """Raise PlanError for a live model, used as it is, that would fail in its first step."""
    wanted = needs.experts_implementation
    chosen = [part._experts_implementation for part in config_tree(model.config)]
    if wanted is not None and "grouped_mm" in chosen:
        raise PlanError(
            f"{needs.architecture} computes its experts in a grouped product, which "
            f"{needs.no_grouped_experts}; call model.set_experts_implementation({wanted!r}) first"
        )
