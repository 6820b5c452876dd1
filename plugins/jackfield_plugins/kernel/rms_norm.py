"""What the RMSNorm layers of transformers' models have in common, and where they differ.

Zhang and Sennrich 2019 (arXiv:1910.07467): each row over the root of its mean square, times a
weight. Families differ in what the weight means and in when the result is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Meaning:
    """How a layer's numbers are meant.

    `epsilon` is added to the mean square. The weight is `offset` + what is stored (1 in Gemma).
    `rounds_first`: the normalized row is rounded to the dtype before the weight comes (Llama).
    """

    epsilon: float
    offset: int
    rounds_first: bool


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm with a weight, by its class's name and its attributes."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and weight is not None
        and weight.dim() == 1
        and _epsilon(module) is not None
        and len(list(module.parameters())) == 1
    )


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(found := getattr(module, name, None), float):
            return found
    return None


def meaning_of(module: nn.Module) -> Meaning:
    """Found out on a row of ones and minus ones, which is its own normalized form.

    What comes out is then the weight as it is meant. The engine compares the rest.
    """
    import torch

    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    row = torch.ones_like(weight)[None]
    with torch.no_grad():
        seen = module(row)[0].float()
    stored = weight.float()
    added = (seen - stored - 1).abs().mean() < (seen - stored).abs().mean()
    epsilon = _epsilon(module)
    assert epsilon is not None
    return Meaning(epsilon, int(added), rounds_first=not added)
