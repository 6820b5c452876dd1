"""Whether the tensors of a checkpoint's files are what its config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.contracts import Requirements
from jackfield.contracts.checkpoint import Form, Tensors, first, paths, unlike


def misfits(
    method: str, bits: int, needs: Requirements, meant: Mapping[str, Any], tensors: Tensors
) -> list[str]:
    """Why they are not; the first reason. `meant` has `group_size` and `head`."""
    found = paths(tensors, ".qweight", ".scales")
    if not found:
        return [f"its config says {method}, and none of its weights is quantized"]
    linear = {w.name.removesuffix(".weight"): w.whole or w.linear for w in needs.weights}
    known = {path: shape for path, shape in linear.items() if shape is not None}
    group, head = int(meant["group_size"]), int(meant["head"] or bits)
    says = f"its config says group_size={group} and head={meant['head']}"
    reasons = first(_unlike(path, known.get(path), group, (bits, head), tensors) for path in found)
    return [f"{says}: {reasons[0]}"] if reasons else []


def _unlike(
    path: str, linear: tuple[int, int] | None, group: int, bits: tuple[int, int], tensors: Tensors
) -> list[str]:
    """What of one layer is not in canonical form.

    One that is not among the linear layers is the head, or has another name in the model.
    """
    if linear is not None:
        return unlike(tensors, _forms(path, linear, group, bits[0]))
    packed = tensors.get(f"{path}.qweight")
    rows, filled = packed.shape if packed is not None and len(packed.shape) == 2 else (0, 0)
    tried = [unlike(tensors, _forms(path, (rows, filled * 8 // b), group, b)) for b in bits]
    return [] if [] in tried else tried[0]


def _forms(path: str, linear: tuple[int, int], group: int, bits: int) -> dict[str, Form]:
    rows, columns = linear
    return {
        f"{path}.qweight": Form(("U8",), (rows, columns * bits // 8)),
        f"{path}.scales": Form(("BF16",), (rows, columns // group)),
    }
