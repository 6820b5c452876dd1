"""What a call must leave as it was: the tensors that it was lent, and torch's own settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from jackfield.contracts import PackedLayer
from jackfield.testing.checks import WrongError
from jackfield.testing.torch_settings import SETTINGS

#: A call draws no number of torch's own, either.
LEFT: Mapping[str, Callable[[], Any]] = {
    **SETTINGS,
    "torch's random numbers": lambda: torch.get_rng_state().numpy().tobytes(),
}


class Snapshot:
    """Tensors, and lists of the host, as they were before a call."""

    def __init__(self, **lent: Any) -> None:
        self._lent = {n: t for n, t in lent.items() if isinstance(t, torch.Tensor)}
        for name, value in lent.items():
            if isinstance(value, PackedLayer):
                self._lent |= _tensors_of(value)
                self._lists: Any = (name, value, _lists_of(value))
        self._before = {name: tensor.detach().clone() for name, tensor in self._lent.items()}
        self._settings = {what: read() for what, read in LEFT.items()}

    def check(self) -> None:
        """Raise WrongError where something is not as it was."""
        for name, tensor in self._lent.items():
            if not _same(tensor, self._before[name]):
                raise WrongError(f"the call changes its {name} in place")
        if hasattr(self, "_lists") and _lists_of(self._lists[1]) != self._lists[2]:
            raise WrongError("the call changes the page tables on the host")
        for what, read in LEFT.items():
            if read() != self._settings[what]:
                raise WrongError(f"the call leaves {what} changed")

    def check_own(self, output: torch.Tensor) -> None:
        """Raise WrongError where `output` lies in the memory of what was lent."""
        for name, tensor in self._lent.items():
            if output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                raise WrongError(f"the output lies in the memory of its {name}")


def _tensors_of(layer: PackedLayer) -> dict[str, torch.Tensor]:
    tables, step = layer.tables, layer.tables.step
    ends = {} if tables.blocks is None else {"ends of blocks": tables.blocks.ends}
    return {
        **ends,
        "pages of keys": layer.keys,
        "pages of values": layer.values,
        "block_table": tables.block_table,
        "first": tables.first,
        "seq_lens": step.seq_lens,
        "cu_seqlens_q": step.cu_seqlens_q,
    }


def _lists_of(layer: PackedLayer) -> Any:
    tables, step = layer.tables, layer.tables.step
    return (
        [list(pages) for pages in tables.tables], list(tables.firsts), list(tables.runs),
        list(step.spans), step.max_seqlen_q, step.max_seqlen_k, tables.window, tables.page_size,
    )  # fmt: skip


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().contiguous().view(whole), other.contiguous().view(whole))
