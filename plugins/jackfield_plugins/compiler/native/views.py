"""Operators that compute nothing in a step: views of numbers, and numbers that stay the same."""

from __future__ import annotations

from typing import Any

from jackfield_plugins.compiler.native.graph import Node, Ref, refs

_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.default",
        "squeeze.dim", "squeeze.dims", "transpose.int", "t.default", "permute.default",
        "expand.default", "slice.Tensor", "select.int", "split.Tensor", "split_with_sizes.default",
        "chunk.default", "unbind.int", "narrow.default", "unflatten.int", "as_strided.default",
        "view_as.default", "expand_as.default", "movedim.int", "diagonal.default", "unfold.default",
        "numpy_T.default", "mT.default", "swapaxes.default", "lift_fresh.default",
    )
)  # fmt: skip


#: What makes the same numbers in each step: made once, when a step is laid out.
CREATED = frozenset(
    f"aten.{name}"
    for name in (
        "arange.default", "arange.start", "arange.start_step", "empty.memory_format",
        "empty_like.default", "full.default", "full_like.default", "new_empty.default",
        "new_full.default", "new_ones.default", "new_zeros.default", "ones.default",
        "ones_like.default", "scalar_tensor.default", "zeros.default", "zeros_like.default",
    )
)  # fmt: skip


def is_view(node: Node) -> bool:
    """Whether `node` makes no numbers of its own."""
    return node.target in _VIEWS or node.target == "getitem"


def viewed(node: Node) -> int:
    """The value that a view looks at."""
    found: Any = node.args[0]
    return found.at if isinstance(found, Ref) else refs(found)[0]
