"""Arithmetic whose bits do not depend on how many rows there are.

A library picks the kernel of a product, and with it the order of its sums, by its shape. So rows go
through in blocks of one size, the last one filled up: every product has the same shape; after
"Defeating Nondeterminism in LLM Inference" (Horace He and Thinking Machines Lab, 2025). Functions
like exp are computed in vectors, and what is left over at the end of a thread's share one by one,
with other roundings. So they go through in blocks that one thread computes in whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield.contracts import ModelInputs

ROWS = 16  # of a product: few enough to decode one sequence, enough to keep it busy
SHARE = 16384  # numbers below which torch splits no operation between threads (gelu is the first)
VECTORS = 64  # numbers that two of the widest vectors hold


def _named(names: Iterable[str]) -> frozenset[Any]:
    """The functions and methods of torch with these names."""
    homes = (torch, torch.Tensor, torch.nn.functional)
    return frozenset(getattr(home, name) for home in homes for name in names if hasattr(home, name))


_PRODUCTS = _named(("linear", "mm"))
_SUMMED_PRODUCTS = _named(("addmm",))
_MATMULS = _named(("matmul", "bmm", "__matmul__"))
_UNKNOWN = _named(("einsum", "tensordot", "baddbmm", "grouped_mm", "_grouped_mm"))
_ROUNDED = _named(
    (
        "__pow__", "celu", "cos", "elu", "erf", "exp", "expm1", "gelu", "hardswish", "log", "log1p",
        "logsigmoid", "mish", "pow", "selu", "sigmoid", "silu", "sin", "softplus", "tanh",
    )
)  # fmt: skip


class _FixedShapes(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNKNOWN:
            raise ExecutionError(
                f"deterministic=True: this model calls {func.__name__}, whose sums may depend on "
                "the batch; load it without deterministic"
            )
        if func in _ROUNDED and args:
            return _in_whole_vectors(lambda part: func(part, *args[1:], **kwargs), args[0])
        if func in _SUMMED_PRODUCTS and len(args) > 1 and args[0].dim() < 2:
            return _in_blocks(lambda rows: func(args[0], rows, *args[2:], **kwargs), args[1])
        if func in _PRODUCTS or (func in _MATMULS and len(args) > 1 and args[1].dim() == 2):
            return _in_blocks(lambda rows: func(rows, *args[1:], **kwargs), args[0])
        if func in _MATMULS and len(args) > 1 and args[0].dim() > 2:
            return _per_batch(lambda rows: func(rows, *args[1:], **kwargs), args[0])
        return func(*args, **kwargs)


def _in_blocks(product: Callable[[torch.Tensor], torch.Tensor], left: torch.Tensor) -> torch.Tensor:
    """`product` of `left` (`[..., inner]`) with a matrix, `ROWS` rows at a time."""
    rows = left.reshape(-1, left.shape[-1])
    found = _per_batch(product, rows)
    return found.view(*left.shape[:-1], found.shape[-1])


def _per_batch(product: Callable[[torch.Tensor], torch.Tensor], left: torch.Tensor) -> torch.Tensor:
    """`product` of `left` (`[..., rows, inner]`), `ROWS` rows at a time."""
    count = left.shape[-2]
    if spare := -count % ROWS:
        left = torch.nn.functional.pad(left, (0, 0, 0, spare))
    return torch.cat([product(block) for block in left.split(ROWS, -2)], -2)[..., :count, :]


def _in_whole_vectors(
    function: Callable[[torch.Tensor], torch.Tensor], numbers: torch.Tensor
) -> torch.Tensor:
    """`function` of each number of `[..., width]`, in blocks without leftovers."""
    if numbers.dim() < 2:
        return function(numbers)
    rows = numbers.reshape(-1, numbers.shape[-1])
    width = rows.shape[1]
    spare = -width % VECTORS
    if spare:
        rows = torch.nn.functional.pad(rows, (0, spare), value=1.0)
    size = max(1, SHARE // (width + spare) - 1)
    found = torch.cat([function(block) for block in rows.contiguous().split(size)])
    return found[:, :width].reshape(numbers.shape)


def with_fixed_shapes(
    forward: Callable[[ModelInputs], torch.Tensor],
) -> Callable[[ModelInputs], torch.Tensor]:
    """`forward` with all its arithmetic in blocks."""

    def fixed(inputs: ModelInputs) -> torch.Tensor:
        with _FixedShapes():
            return forward(inputs)

    return fixed
