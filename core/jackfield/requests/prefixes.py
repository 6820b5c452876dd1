"""`prefix_allowed_tokens_fn`: which tokens may follow, by a caller's function of what there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AllowedByPrefix:
    """A processor that forbids what `allowed(number, tokens)` does not list, as transformers does.

    `number` is that of the prompt among those of the call.
    """

    allowed: Callable[[int, torch.Tensor], Any]
    number: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import torch

        tokens = torch.as_tensor(self.allowed(self.number, ids[0]), device=scores.device)
        if tokens.numel() == 0:
            raise ValueError("prefix_allowed_tokens_fn allows no token")
        kept = torch.full_like(scores, -torch.inf)
        tokens = tokens.flatten().long()
        kept[:, tokens] = scores[:, tokens]
        return kept
