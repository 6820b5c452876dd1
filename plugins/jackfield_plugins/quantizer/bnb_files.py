"""What the files of a checkpoint of bitsandbytes have to hold, and a model that was read of them.

bitsandbytes looks at none of it: it reads past the end of scales that are too few, and takes bytes
for numbers of another type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jackfield.contracts import Requirements
from jackfield.contracts.checkpoint import (
    Field,
    Form,
    StoredTensor,
    Tensors,
    first,
    odd_fields,
    one_of,
    paths,
    shown,
    unlike,
)

#: what `bnb_4bit_quant_storage` may be, as files call it -> bytes of one
STORAGES = {
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
}
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKS_OF_SCALES = 256
TYPES = ("nf4", "fp4")

#: beside the packed weight of a layer: tensors that only 4 bits have
_STATE = ".weight.quant_state.bitsandbytes__"
_PARTS = (
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    *(_STATE + kind for kind in TYPES),
)
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHAPE = "the shape of a matrix"
_STATE_FIELDS = {
    "blocksize": one_of(*BLOCKS),
    "dtype": one_of("bfloat16", "float16", "float32"),
    "nested_blocksize": one_of(BLOCKS_OF_SCALES),
    "nested_dtype": one_of("float32"),
    "nested_offset": Field(
        lambda given: type(given) is float and math.isfinite(given), "a finite number"
    ),
}


def matrices(needs: Requirements) -> dict[str, tuple[int, int]]:
    """`(out_features, in_features)` of each linear layer that may be quantized, by its path."""
    return {
        weight.name.removesuffix(".weight"): weight.linear
        for weight in needs.weights
        if weight.linear is not None
    }


def four_bits(needs: Requirements, stored: Mapping[str, Any], tensors: Tensors) -> list[str]:
    """Why the tensors are not those of layers in 4 bits; the first reason."""
    known, found = matrices(needs), paths(tensors, *_PARTS)
    layers = [_four_bits(path, known.get(path), stored, tensors) for path in found]
    bare = _bare(known, set(found), stored, tensors, "weight.absmax")
    return first((*layers, *bare))


def _four_bits(
    path: str, shape: tuple[int, int] | None, stored: Mapping[str, Any], tensors: Tensors
) -> list[str]:
    kind = str(stored.get("bnb_4bit_quant_type", "fp4"))
    state = f"{path}{_STATE}{kind}"
    if reasons := unlike(tensors, {state: Form(("U8",), _own_shape(tensors, state))}):
        return reasons
    told = _json(tensors[state], state)
    nested = bool(stored.get("bnb_4bit_use_double_quant"))
    if reasons := _odd_state(told, kind, shape, nested):
        return [f"{state} in {tensors[state].file.name}: {reasons[0]}"]
    forms = _forms(path, told, str(stored.get("bnb_4bit_quant_storage", "uint8")), nested)
    if reasons := unlike(tensors, forms):
        return reasons
    more = [
        name for part in _PARTS if (name := path + part) in tensors and name not in (*forms, state)
    ]
    return [f"{name} is there, and the config says nothing of it" for name in more[:1]]


def _own_shape(tensors: Tensors, name: str) -> tuple[int, ...]:
    """As long as it is: the length of a text is not known before."""
    found = tensors.get(name)
    return found.shape if found is not None and len(found.shape) == 1 else (1,)


def _json(tensor: StoredTensor, name: str) -> dict[str, Any]:
    from safetensors import safe_open

    try:
        with safe_open(tensor.file, "numpy") as file:
            told = json.loads(file.get_tensor(name).tobytes())
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _odd_state(
    told: Mapping[str, Any], kind: str, shape: tuple[int, int] | None, nested: bool
) -> list[str]:
    """What is wrong with the text beside a layer."""
    wanted = ["quant_type", "shape", "blocksize", "dtype"]
    wanted += ["nested_blocksize", "nested_dtype", "nested_offset"] if nested else []
    if lacks := [name for name in wanted if name not in told]:
        return [f"has no {lacks[0]}"]
    sizes = told["shape"]
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or any(type(n) is not int or n < 1 for n in sizes)
    ):
        return [f"shape is {shown(str(sizes))}, and has to be {_SHAPE}"]
    if shape is not None and tuple(sizes) != shape:
        return [f"shape is {sizes}, and the layer has {list(shape)}"]
    if more := told.keys() - {"quant_type", "shape", *_STATE_FIELDS}:
        return [f"has {shown(min(more))}, which nothing reads"]
    return odd_fields(told, {"quant_type": one_of(kind), **_STATE_FIELDS})


def _forms(path: str, told: Mapping[str, Any], storage: str, nested: bool) -> dict[str, Form]:
    dtype, size = STORAGES.get(storage, STORAGES["uint8"])
    numbers = math.prod(told["shape"])
    blocks = math.ceil(numbers / told["blocksize"])
    packed = math.ceil(math.ceil(numbers / 2) / size)
    forms = {
        f"{path}.weight": Form((dtype,), (packed, 1)),
        f"{path}.weight.quant_map": Form(("F32",), (16,)),
        f"{path}.weight.absmax": Form(("U8" if nested else "F32",), (blocks,)),
    }
    if nested:
        scales = math.ceil(blocks / told["nested_blocksize"])
        forms[f"{path}.weight.nested_absmax"] = Form(("F32",), (scales,))
        forms[f"{path}.weight.nested_quant_map"] = Form(("F32",), (256,))
    return forms


def eight_bits(needs: Requirements, stored: Mapping[str, Any], tensors: Tensors) -> list[str]:
    """Why the tensors are not those of layers in 8 bits; the first reason."""
    known, found = matrices(needs), paths(tensors, ".SCB", ".weight_format")
    layers = [_eight_bits(path, known.get(path), tensors) for path in found]
    return first((*layers, *_bare(known, set(found), stored, tensors, "SCB")))


def _eight_bits(path: str, shape: tuple[int, int] | None, tensors: Tensors) -> list[str]:
    weight = tensors.get(f"{path}.weight")
    rows = shape or (weight.shape if weight is not None and len(weight.shape) == 2 else (1, 1))
    forms = {f"{path}.weight": Form(("I8",), rows), f"{path}.SCB": Form(("F32",), rows[:1])}
    if f"{path}.weight_format" in tensors:
        forms[f"{path}.weight_format"] = Form(("U8",), ())
    return unlike(tensors, forms)


def _bare(
    known: Mapping[str, tuple[int, int]],
    found: set[str],
    stored: Mapping[str, Any],
    tensors: Tensors,
    scales: str,
) -> Iterator[list[str]]:
    """Layers without what makes numbers of their weights. The config may name some that are whole;
    these are of floating point.
    """
    some_are_whole = bool(stored.get("llm_int8_skip_modules"))
    for path in known.keys() - found:
        weight = tensors.get(f"{path}.weight")
        if weight is not None and not (some_are_whole and weight.dtype in _FLOATS):
            yield [f"its config says that bitsandbytes quantized it, and it has no {path}.{scales}"]
