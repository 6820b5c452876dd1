"""What rounding may do to logits: of keys and values, and of states that go from step to step."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from jackfield.testing.models import Reference


class Rounded(transformers.DynamicCache):
    """Keys and values as far off as they may be, in a direction that chance chooses."""

    def __init__(self, config: Any, rounding: float, seed: int) -> None:
        super().__init__(config=config)
        self._rounding = rounding
        self._generator = torch.Generator().manual_seed(seed)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(
            self._rounded(key_states), self._rounded(value_states), *args, **kwargs
        )

    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(states.shape, generator=self._generator, dtype=torch.float64)
        noise = noise.to(states.device)
        of_a_token = states.double().norm(dim=(1, 3), keepdim=True)
        noise *= self._rounding * of_a_token / noise.norm(dim=(1, 3), keepdim=True)
        return (states.double() + noise).to(states.dtype)


class LossyReference(Reference):
    """The same, with a bound for a cache that is off by `rounding` of a token's length."""

    def __init__(self, model: transformers.PreTrainedModel, rounding: float) -> None:
        super().__init__(model)
        self._rounding = rounding

    @torch.inference_mode()
    def bound(self, tokens: tuple[int, ...]) -> float:
        exact, worst = self.logits(tokens), super().bound(tokens)
        ids = torch.tensor([tokens], device=self._exact.device)
        for seed in range(3):
            past = Rounded(self._exact.config, self._rounding, seed)
            found = self._exact(input_ids=ids, past_key_values=past, use_cache=True).logits[0].cpu()
            worst = max(worst, 4 * float((found - exact).abs().max()))
        return worst


class SteppedReference(Reference):
    """The same, with a bound for layers that compute a prompt and single tokens in other ways."""

    @torch.inference_mode()
    def bound(self, tokens: tuple[int, ...]) -> float:
        past = transformers.DynamicCache(config=self._own.config)
        rows = []
        for token in tokens:
            ids = torch.tensor([[token]], device=self._own.device)
            found = self._own(input_ids=ids, past_key_values=past, use_cache=True)
            rows.append(found.logits[0, -1].double().cpu())
        off = float((torch.stack(rows) - self.logits(tokens)).abs().max())
        return max(super().bound(tokens), 4 * off)
