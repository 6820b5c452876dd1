"""Matrix products whose bits do not depend on how many rows there are.

A library picks its kernel, and with it the order of its sums, by the shape of a product. So rows go
through in blocks of one size, the last one filled up, and every product has the same shape; after
"Defeating Nondeterminism in LLM Inference" (Horace He and Thinking Machines Lab, 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield.contracts import ModelInputs

ROWS = 16  # of a block: few enough to decode one sequence, enough to keep a product busy

_RIGHT = {torch.nn.functional.linear: 0, torch.mm: 0, torch.addmm: 1}  # where the rows stand
_GROUPED = [
    getattr(home, name)
    for home, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))
    if hasattr(home, name)
]


class _FixedProducts(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _GROUPED:
            raise ExecutionError(
                "deterministic=True: the experts of this model are computed in one grouped "
                "product, whose sums depend on the batch; load it with "
                "experts_implementation='eager'"
            )
        if (at := _RIGHT.get(func)) is None or len(args) <= at:
            return func(*args, **kwargs)
        return _in_blocks(lambda rows: func(*args[:at], rows, *args[at + 1 :], **kwargs), args[at])


def _in_blocks(product: Callable[[torch.Tensor], torch.Tensor], left: torch.Tensor) -> torch.Tensor:
    """`product` of `left` (`[..., inner]`), `ROWS` rows at a time."""
    rows = left.reshape(-1, left.shape[-1])
    count = len(rows)
    if spare := -count % ROWS:
        rows = torch.cat([rows, rows.new_zeros(spare, rows.shape[1])])
    found = torch.cat([product(block) for block in rows.split(ROWS)])[:count]
    return found.view(*left.shape[:-1], found.shape[-1])


def with_fixed_products(
    forward: Callable[[ModelInputs], torch.Tensor],
) -> Callable[[ModelInputs], torch.Tensor]:
    """`forward` with all its products in blocks."""

    def fixed(inputs: ModelInputs) -> torch.Tensor:
        with _FixedProducts():
            return forward(inputs)

    return fixed
