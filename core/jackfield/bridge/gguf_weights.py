"""The weights of a GGUF file under the names of transformers' model, read when they are asked for.

What llama.cpp's converters did to a tensor, transformers undoes by functions on whole matrices
(`TENSOR_PROCESSORS`). Where that only moves rows, it moves rows of blocks as well, so the function
is asked about a matrix of row numbers: blocks stay as they are in the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from jackfield.bridge.gguf_header import GgufHeader, GgufTensor
from jackfield.bridge.gguf_rope import DIVISORS
from jackfield.errors import CheckpointError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    path: Path
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
        raw = np.memmap(self.path, np.uint8, "r", self.tensor.start, shape)
        return torch.from_numpy(_unpacked(np.asarray(raw[at]), self.tensor.type))

    def _bytes(self) -> Numbers:
        found = np.fromfile(self.path, np.uint8, self.tensor.nbytes, offset=self.tensor.start)
        if len(found) < self.tensor.nbytes:
            raise CheckpointError(f"{self.path} was cut off while it was read; fetch it again")
        return found.reshape(*self.tensor.shape[:-1], -1)

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


@functools.cache
def _can_unpack(kind: str) -> bool:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        _unpacked(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8), kind)
    except (NotImplementedError, ValueError):
        return False
    return True


def weights_of_file(
    header: GgufHeader, model: PreTrainedModel
) -> dict[str, GgufWeight | torch.Tensor]:
    """What the file has of `model` (on the meta device), by the model's names; what belongs
    nowhere by the file's. Weights that are made of several tensors are read now.

    Raises CheckpointError: a tensor of another shape than the model's, or of a type that nobody
    can unpack.
    """
    from transformers import modeling_gguf_pytorch_utils

    library: Any = modeling_gguf_pytorch_utils  # in part without types
    processor = _processor(header, model)
    try:
        names: dict[str, str] = library.get_gguf_hf_weights_map(
            _Named(model), processor, header.architecture
        )
    except NotImplementedError:
        raise CheckpointError(
            f"{header.path} is of architecture {header.architecture!r}, whose names of tensors "
            "the package gguf does not know; upgrade it"
        ) from None
    expected = model.state_dict()
    joined: dict[str, torch.Tensor] = {}
    found: dict[str, GgufWeight | torch.Tensor] = {}
    for name, tensor in header.tensors.items():
        if name == DIVISORS:  # of the config
            continue
        if not _can_unpack(tensor.type):
            raise CheckpointError(
                f"{header.path}: {shown(name)} is of type {tensor.type}, which the package gguf "
                "does not unpack; give a file with other blocks"
            )
        process = functools.partial(
            processor.process,
            name=name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": joined},
        )
        ours = names.get(name, name)
        layer = model.get_submodule(ours.rpartition(".")[0]) if ours in expected else None
        weight = _weight(header, name, process, isinstance(layer, Conv1D))
        if weight is None:  # processed into `joined`
            continue
        _check_shape(header, weight, ours, expected)
        found[ours] = weight
    return {**found, **joined}


class _Named:
    """The names in a model, and in the one inside it; for a function of transformers that asks
    every module of all levels, which takes seconds.
    """

    def __init__(self, model: nn.Module, config: Any = None) -> None:
        self.config = config or model.config
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict()

    def named_children(self) -> list[tuple[str, _Named]]:
        prefix: str = getattr(self._model, "base_model_prefix", "")
        inner = getattr(self._model, prefix, None) if prefix else None
        return [(prefix, _Named(inner, self.config))] if isinstance(inner, nn.Module) else []


def _processor(header: GgufHeader, model: PreTrainedModel) -> Any:
    from transformers import modeling_gguf_pytorch_utils

    library: Any = modeling_gguf_pytorch_utils
    made = library.TENSOR_PROCESSORS.get(header.architecture, library.TensorProcessor)
    fields = model.config.to_dict()
    fields |= {name: getattr(model.config, name) for name in model.config.attribute_map}
    return made(config=fields)


def _weight(
    header: GgufHeader, name: str, process: Callable[..., Any], transposed: bool
) -> GgufWeight | None:
    """The tensor `name`; None where it became a part of a weight that has several."""
    tensor = header.tensors[name]
    plain = GgufWeight(name, header.path, tensor)
    if len(tensor.shape) == 2:
        moved = _moved_rows(process, tensor.shape[0], transposed)
        if moved is not None:
            rows = None if (moved == np.arange(len(moved))).all() else moved
            return GgufWeight(name, header.path, tensor, rows, None, transposed)
    if len(tensor.shape) > 2 or process(_like(tensor)).name is None:
        numbers = plain.to(dtype=torch.float32).numpy()
        if process(numbers).name is None:
            return None
    return GgufWeight(
        name, header.path, tensor, None, lambda numbers: np.asarray(process(numbers).weights)
    )


def _like(tensor: GgufTensor) -> Numbers:
    """Numbers of its shape that take no memory."""
    return np.broadcast_to(np.float32(-1), tensor.shape)


def _moved_rows(process: Callable[..., Any], rows: int, transposed: bool) -> Numbers | None:
    """Where `process` takes each row from, if that is all that it does to a matrix."""
    asked = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
    try:
        done = process(asked)
    except (ValueError, TypeError):
        return None
    if done.name is None:
        return None
    made = done.weights.T if transposed else done.weights
    if made.shape != asked.shape or (made[:, 1] != made[:, 0] + 1).any():
        return None
    moved: Numbers = (made[:, 0] / 2).astype(np.int64)
    whole = np.array_equal(np.sort(moved), np.arange(rows)) and (made[:, 0] == 2 * moved).all()
    return moved if whole else None


def _check_shape(
    header: GgufHeader, weight: GgufWeight, ours: str, expected: Mapping[str, torch.Tensor]
) -> None:
    if ours not in expected or weight.change is not None:
        return
    due = tuple(expected[ours].shape)
    found = weight.tensor.shape[::-1] if weight.transposed else weight.tensor.shape
    if due != found:
        raise CheckpointError(
            f"{shown(weight.name)} in {header.path} is {weight.tensor}, and has to have the shape "
            f"{list(due[::-1] if weight.transposed else due)} of {ours}; its keys do not fit its "
            "tensors"
        )


def missing(weights: Mapping[str, Any], model: PreTrainedModel) -> Iterator[str]:
    """What `model` needs and a file has not."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    yield from (name for name in model.state_dict() if name not in weights and name not in tied)
