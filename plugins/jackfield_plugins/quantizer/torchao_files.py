"""What the files of a checkpoint of torchao have to hold: tensors, and how they make up a weight.

torchao puts together what the metadata of the files say, and compares no shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jackfield.contracts import Requirements
from jackfield.contracts.checkpoint import Form, Tensors, first, shown, unlike

_SCALES = ("F32", "F16", "BF16")


def misfits(needs: Requirements | None, tensors: Tensors) -> list[str]:
    """Why the tensors of a checkpoint's files are not those of torchao; the first reason."""
    if needs is None or needs.stored is None:
        return []
    if not any(name.endswith("_qdata") for name in tensors):
        return [
            "its config says that torchao quantized it, and its weights are as they always were"
        ]
    metadata = _metadata(tensors)
    known = {w.name: w.linear for w in needs.weights if w.linear and not w.transposed}
    told = {name: _told(metadata.get(name)) for name in _names(metadata)}
    return first(
        (
            _strays(told, tensors),
            *(_unlike(name, data, known.get(name), tensors) for name, data in told.items()),
        )
    )


def _metadata(tensors: Tensors) -> dict[str, str]:
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in {tensor.file for tensor in tensors.values()}:
        with safe_open(path, "numpy") as file:
            found |= file.metadata() or {}
    return found


def _names(metadata: Mapping[str, str]) -> list[str]:
    """The weights that the metadata tell of."""
    told = _json(metadata.get("tensor_names"))
    if not isinstance(told, list):
        return []
    return [name for name in told if isinstance(name, str) and "." in name]


def _told(text: str | None) -> dict[str, Any]:
    told = _json(text)
    return told if isinstance(told, dict) else {}


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def _part(name: str, own: str) -> str:
    path, _, weight = name.rpartition(".")
    return f"{path}._{weight}_{own}"


def _strays(told: Mapping[str, Mapping[str, Any]], tensors: Tensors) -> list[str]:
    """Tensors of which the metadata say nothing, and would be left out."""
    meant = {_part(name, own) for name, data in told.items() for own in _parts(data)}
    for name in sorted(tensors):
        if "._weight_" in name and name not in meant:
            return [f"the metadata of {tensors[name].file.name} say nothing of {name}"]
    return []


def _parts(told: Mapping[str, Any]) -> list[str]:
    names = told.get("_tensor_data_names")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


def _unlike(
    name: str, told: Mapping[str, Any], linear: tuple[int, int] | None, tensors: Tensors
) -> list[str]:
    kind = told.get("_type")
    if kind == "Tensor":
        return []  # where it is tied to another, only that one is there
    if kind != "Int8Tensor":
        return _present(name, told, tensors)
    data, parts = told.get("_data"), _parts(told)
    block = data.get("block_size") if isinstance(data, dict) else None
    if sorted(parts) not in (["qdata", "scale"], ["qdata", "scale", "zero_point"]):
        return [f"the metadata of {name} tell of the parts {shown(str(parts))}"]
    rows, columns = linear or _matrix(tensors.get(_part(name, "qdata")))
    if (
        not isinstance(block, list)
        or [type(n) for n in block] != [int, int]
        or block[0] != 1
        or block[1] < 1
        or columns % block[1]
    ):
        return [f"the metadata of {name} tell of blocks of {shown(str(block))}"]
    scales = (rows, columns // block[1])
    forms = {
        "qdata": Form(("I8",), (rows, columns)),
        "scale": Form(_SCALES, scales),
        "zero_point": Form(("I8",), scales),
    }
    return unlike(tensors, {_part(name, own): forms[own] for own in parts})


def _matrix(tensor: Any) -> tuple[int, int]:
    return tensor.shape if tensor is not None and len(tensor.shape) == 2 else (0, 0)


def _present(name: str, told: Mapping[str, Any], tensors: Tensors) -> list[str]:
    """Of a kind whose shapes are not known here."""
    parts = _parts(told)
    if not parts:
        return [f"the metadata of {name} do not say what it is made of"]
    lacks = [part for own in parts if (part := _part(name, own)) not in tensors]
    return [f"there is no {lacks[0]}, of which the metadata tell"] if lacks else []
