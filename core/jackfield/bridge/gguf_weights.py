"""The weights of a GGUF file as the model has them, read when they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jackfield.bridge.gguf_header import GgufTensor
from jackfield.errors import CheckpointError

if TYPE_CHECKING:
    Numbers = np.ndarray[Any, Any]

_VALUES = ("F32", "F16", "BF16", "F64")
_CHUNK = 1 << 22  # numbers that are unpacked at a time


@dataclass(frozen=True, eq=False)
class GgufWeight:
    """A weight of the model. transformers materializes it as a slice of a file: `weight[...]`, then
    `to`, of which the dtype decides what comes.

    Attributes:
        rows: Where each row of the model's matrix is in the file's; None: in the same place.
        change: What makes the model's numbers of the file's, where that is not all about rows.
        transposed: The model has the matrix as `[in, out]`, the file and blocks as `[out, in]`.
    """

    name: str
    tensor: GgufTensor
    rows: Numbers | None = None
    change: Callable[[Numbers], Numbers] | None = None
    transposed: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether it can stay as the file has it: a matrix of blocks of which whole rows move."""
        matrix = len(self.tensor.shape) == 2 and self.tensor.type not in _VALUES
        return matrix and self.change is None

    def __getitem__(self, everything: Any) -> GgufWeight:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its numbers in `dtype`, or of uint8 its blocks, `[out_features, bytes of a row]`.

        Raises CheckpointError where the file was cut off meanwhile.
        """
        made = self.blocks() if dtype is torch.uint8 else self._numbers(dtype or torch.float32)
        return made.to(device=device)

    def blocks(self) -> torch.Tensor:
        """Rows of blocks in the model's order: uint8, memory of its own."""
        return torch.from_numpy(self._in_order(self._bytes()))

    def first_rows(self, count: int) -> torch.Tensor:
        """The first rows of the model's matrix `[out, in]`, unpacked: float32."""
        at = slice(count) if self.rows is None else self.rows[:count]
        shape = (self.tensor.shape[0], self.tensor.nbytes // self.tensor.shape[0])
        raw = np.memmap(self.tensor.path, np.uint8, "r", self.tensor.start, shape)
        return torch.from_numpy(_unpacked(np.array(raw[at]), self.tensor.type))

    def _bytes(self) -> Numbers:
        path, of = self.tensor.path, self.tensor
        found = np.fromfile(path, np.uint8, of.nbytes, offset=of.start)
        if len(found) < of.nbytes:
            raise CheckpointError(f"{path} was cut off while it was read; fetch it again")
        return found.reshape(*of.shape[:-1], -1)

    def _in_order(self, rows: Numbers) -> Numbers:
        return rows if self.rows is None else rows[self.rows]

    def _numbers(self, dtype: torch.dtype) -> torch.Tensor:
        raw = self._bytes()
        if self.change is not None:
            changed = self.change(_unpacked(raw, self.tensor.type))
            return torch.from_numpy(np.ascontiguousarray(changed)).to(dtype)
        raw = self._in_order(raw).reshape(-1, raw.shape[-1])
        made = torch.empty(len(raw), self.tensor.shape[-1], dtype=dtype)
        rows = max(1, _CHUNK // made.shape[1])
        for start in range(0, len(raw), rows):
            some = _unpacked(raw[start : start + rows], self.tensor.type)
            made[start : start + rows] = torch.from_numpy(some)
        made = made.reshape(self.tensor.shape)
        return made.T.contiguous() if self.transposed else made


def _unpacked(raw: Numbers, kind: str) -> Numbers:
    """float32 of the bytes of rows, by the package's own functions."""
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    if kind == "F64":
        return raw.view("<f8").astype(np.float32)
    made: Numbers = quants.dequantize(raw, GGMLQuantizationType[kind])
    return made


@dataclass(frozen=True, eq=False)
class JoinedWeight:
    """A weight of the model that is several tensors of the file, unpacked: experts."""

    name: str
    parts: tuple[GgufWeight, ...]
    join: Callable[[GgufWeight, dict[str, torch.Tensor]], None]

    def __getitem__(self, everything: Any) -> JoinedWeight:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its numbers."""
        made: dict[str, torch.Tensor] = {}
        for part in self.parts:
            self.join(part, made)
        return made[self.name].to(device=device, dtype=dtype)


@functools.cache
def can_unpack(kind: str) -> bool:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        _unpacked(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8), kind)
    except (NotImplementedError, ValueError):
        return False
    return True
