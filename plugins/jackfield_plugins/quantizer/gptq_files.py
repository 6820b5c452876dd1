"""What the files of a checkpoint of GPTQ have to hold, and the layers that were read of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jackfield.contracts.checkpoint import Form, Tensors, first, paths, unlike
from jackfield.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BITS = (2, 3, 4, 8)
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_SCALES = ("F16", "BF16", "F32")


def layer_forms(linear: tuple[int, int], bits: int, group_size: int) -> dict[str, Form]:
    """The tensors of one layer: packed int32, scales, and the group of each column."""
    out_features, in_features = linear
    groups = 1 if group_size == -1 else math.ceil(in_features / group_size)
    return {
        "qweight": Form(("I32",), (in_features * bits // 32, out_features)),
        "qzeros": Form(("I32",), (groups, out_features * bits // 32)),
        "scales": Form(_SCALES, (groups, out_features)),
        "g_idx": Form(("I32",), (in_features,)),
    }


def misfits(
    layers: Mapping[str, tuple[int, int]], told: tuple[int, int] | None, tensors: Tensors
) -> list[str]:
    """Why the tensors are not those of `layers` in `told` bits and groups; the first reason.

    `told` is None where layers may differ in them: then each has to fit in itself.
    """
    found = paths(tensors, ".qweight")
    if not found:
        return ["its config says that gptq quantized it, and it has no qweight"]
    if told is None:
        return first(_by_itself(path, tensors) for path in found)
    bits, size = told
    says = f"its config says bits={bits} and group_size={size}, and does not fit the weights"
    reasons = first(
        _unlike(path, layers.get(path), bits, size, tensors)
        for path in dict.fromkeys((*layers, *paths(tensors, *_PARTS)))
    )
    return [f"{says}: {reasons[0]}"] if reasons else []


def _unlike(
    path: str, linear: tuple[int, int] | None, bits: int, size: int, tensors: Tensors
) -> list[str]:
    shape = linear or _linear(path, tensors)
    if shape is None:
        return [f"{path} has no qweight and g_idx of a matrix"]
    forms = layer_forms(shape, bits, size)
    return unlike(tensors, {f"{path}.{own}": form for own, form in forms.items()})


def _linear(path: str, tensors: Tensors) -> tuple[int, int] | None:
    """Outputs and inputs, by the shapes themselves."""
    packed, index = tensors.get(f"{path}.qweight"), tensors.get(f"{path}.g_idx")
    if packed is None or index is None or len(packed.shape) != 2 or len(index.shape) != 1:
        return None
    return packed.shape[1], index.shape[0]


def _by_itself(path: str, tensors: Tensors) -> list[str]:
    shape, scales = _linear(path, tensors), tensors.get(f"{path}.scales")
    if shape is None or scales is None or len(scales.shape) != 2 or not all(scales.shape):
        return [f"{path} has no qweight, g_idx and scales of a matrix"]
    size = math.ceil(shape[1] / scales.shape[0])
    tried = [_unlike(path, shape, bits, size, tensors) for bits in BITS]
    return [] if [] in tried else tried[BITS.index(4)]


def check_groups(model: PreTrainedModel) -> None:
    """Raise CheckpointError where a column is of a group that there is not: kernels do not look."""
    for path, module in model.named_modules():
        layer: Any = module
        index, scales = getattr(layer, "g_idx", None), getattr(layer, "scales", None)
        if index is None or scales is None or not index.numel():
            continue
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= len(scales):
            raise CheckpointError(
                f"the checkpoint has groups {low} to {high} in {path}.g_idx, and scales of "
                f"{len(scales)} groups; fetch it again"
            )
