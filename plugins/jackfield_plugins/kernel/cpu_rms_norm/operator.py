"""The kernel as an operator of torch, which a compiler sees and does not look into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield_plugins.kernel.cpu_rms_norm import call
from jackfield_plugins.native.operators import check_device, operator

if TYPE_CHECKING:
    import torch


def _shape(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: int, rounds_first: bool
) -> torch.Tensor:
    check_device("cpu-rms-norm", rows=rows, weight=weight)
    return rows.new_empty(rows.shape)


#: `call.rms_norm` of what it is given.
rms_norm = operator(
    "cpu_rms_norm(Tensor rows, Tensor weight, float epsilon, int offset, bool rounds_first) "
    "-> Tensor",
    call.rms_norm,
    _shape,
)
