"""Which tensor of a GGUF file is which weight of the model, and what was done to it.

What llama.cpp's converters did to a tensor, transformers undoes by functions on whole matrices
(`TENSOR_PROCESSORS`). Where that only moves rows, it moves rows of blocks as well, so the function
is asked about a matrix of row numbers: blocks stay as they are in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from jackfield.bridge.gguf_header import GgufHeader
from jackfield.bridge.gguf_rope import DIVISORS
from jackfield.bridge.gguf_weights import GgufWeight, JoinedWeight, can_unpack
from jackfield.errors import CheckpointError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Numbers = np.ndarray[Any, Any]


def weights_of_file(
    header: GgufHeader, model: PreTrainedModel
) -> dict[str, GgufWeight | JoinedWeight]:
    """What the file has of `model` (on the meta device), by the model's names; what belongs
    nowhere by the file's.

    Raises CheckpointError: a tensor of another shape than the model's, or of a type that nobody
    can unpack.
    """
    conversion = _Conversion(header, model)
    expected = model.state_dict()
    found: dict[str, GgufWeight | JoinedWeight] = {}
    for name, tensor in header.tensors.items():
        if name == DIVISORS:  # of the config
            continue
        if not can_unpack(tensor.type):
            raise CheckpointError(
                f"{header.path}: {shown(name)} is of type {tensor.type}, which the package gguf "
                "does not unpack; give a file with other blocks"
            )
        if (whole := conversion.joins(name)) is not None:
            before = found.get(whole)
            parts = before.parts if isinstance(before, JoinedWeight) else ()
            plain = GgufWeight(name, tensor)
            found[whole] = JoinedWeight(whole, (*parts, plain), conversion.join)
            continue
        ours = conversion.names.get(name, name)
        if ours not in expected and (of := _left_out(name, conversion.names)) is not None:
            raise CheckpointError(
                f"{header.path} has {shown(name)} beside {of}, which a {type(model).__name__} "
                "of its config leaves out; give the model's folder or hub id"
            )
        layer = model.get_submodule(ours.rpartition(".")[0]) if ours in expected else None
        weight = conversion.weight(name, isinstance(layer, Conv1D))
        _check_shape(header, weight, ours, expected)
        found[ours] = weight
    return found


def _left_out(name: str, known: Mapping[str, str]) -> str | None:
    """The matrix of which a tensor that the model has no place for is the bias or the scale."""
    stem, _, last = name.rpartition(".")
    of = f"{stem}.weight"
    return of if last in ("bias", "scale") and of in known else None


class _Conversion:
    """transformers' own names and functions for the tensors of one file."""

    def __init__(self, header: GgufHeader, model: PreTrainedModel) -> None:
        from transformers import modeling_gguf_pytorch_utils

        library: Any = modeling_gguf_pytorch_utils  # in part without types
        fields = model.config.to_dict()
        fields |= {name: getattr(model.config, name) for name in model.config.attribute_map}
        made = library.TENSOR_PROCESSORS.get(header.architecture, library.TensorProcessor)
        self._processor: Any = made(config=fields)
        self._header = header
        try:
            self.names: dict[str, str] = library.get_gguf_hf_weights_map(
                _Named(model), self._processor, header.architecture
            )
        except NotImplementedError:
            raise CheckpointError(
                f"{header.path} is of architecture {header.architecture!r}, whose names of "
                "tensors the package gguf does not know; upgrade it"
            ) from None

    def _process(self, name: str, numbers: Numbers, joined: dict[str, torch.Tensor]) -> Any:
        """What becomes of a tensor; its name is None where it went into `joined`."""
        return self._processor.process(
            numbers,
            name=name,
            tensor_key_mapping=self.names,
            parsed_parameters={"tensors": joined},
        )

    def joins(self, name: str) -> str | None:
        """The weight of which a tensor becomes a part; None: it is one by itself."""
        joined: dict[str, torch.Tensor] = {}
        tiny = np.full([1] * len(self._header.tensors[name].shape), -1, np.float32)
        try:
            done = self._process(name, tiny, joined)
        except (KeyError, ValueError):  # one that has to have its own shape
            return None
        return next(iter(joined), None) if done.name is None else None

    def join(self, part: GgufWeight, joined: dict[str, torch.Tensor]) -> None:
        """Put a part where it belongs in its weight, which is made by the first."""
        self._process(part.name, part.to(dtype=torch.float32).numpy(), joined)

    def weight(self, name: str, transposed: bool) -> GgufWeight:
        """A tensor that is a weight."""
        tensor = self._header.tensors[name]
        moved = self._moved_rows(name, transposed) if len(tensor.shape) == 2 else None
        if moved is not None:
            rows = None if (moved == np.arange(len(moved))).all() else moved
            return GgufWeight(name, tensor, rows, None, transposed)
        return GgufWeight(name, tensor, None, partial(self._changed, name))

    def _changed(self, name: str, numbers: Numbers) -> Numbers:
        return np.asarray(self._process(name, numbers, {}).weights)

    def _moved_rows(self, name: str, transposed: bool) -> Numbers | None:
        """Where each row comes from, if that is all that is done to a matrix."""
        rows = self._header.tensors[name].shape[0]
        asked = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
        try:
            done = self._process(name, asked, {})
        except (ValueError, TypeError):
            return None
        made = done.weights.T if transposed else done.weights
        if made.shape != asked.shape or (made[:, 1] != made[:, 0] + 1).any():
            return None
        moved: Numbers = (made[:, 0] / 2).astype(np.int64)
        whole = np.array_equal(np.sort(moved), np.arange(rows)) and (made[:, 0] == 2 * moved).all()
        return moved if whole else None


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


def _check_shape(
    header: GgufHeader, weight: GgufWeight, ours: str, expected: Mapping[str, torch.Tensor]
) -> None:
    if ours not in expected or weight.change is not None:
        return
    due = tuple(expected[ours].shape)
    found = weight.tensor.shape[::-1] if weight.transposed else weight.tensor.shape
    if due != found:
        raise CheckpointError(
            f"{shown(weight.name)} in {weight.tensor.path} is {weight.tensor}, and has to have the "
            f"shape {list(due[::-1] if weight.transposed else due)} of {ours}; its keys do not fit "
            "its tensors"
        )


def missing(weights: Mapping[str, Any], model: PreTrainedModel) -> Iterator[str]:
    """What `model` needs and a file has not."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    yield from (name for name in model.state_dict() if name not in weights and name not in tied)
