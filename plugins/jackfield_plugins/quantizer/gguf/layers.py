"""The modules that take the place of linear layers and embeddings: their weights are blocks."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from jackfield.errors import ExecutionError
from jackfield_plugins.quantizer.gguf import native
from jackfield_plugins.quantizer.gguf.native import Matrix
from jackfield_plugins.quantizer.gguf.operator import gguf_linear, gguf_rows
from jackfield_plugins.quantizer.on_cpu import shape_alone

DTYPES = (torch.bfloat16, torch.float32)


class _InBlocks(nn.Module):
    """A matrix in the kernel's layout: `weight`, uint8, which layers with tied weights share.

    On the meta device, and until `set_blocks`, it has the shape of the file's blocks. It computes
    no gradients.
    """

    weight: nn.Parameter

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.matrix = matrix
        empty = torch.empty(matrix.out_features, matrix.row_bytes, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)

    def set_blocks(self, blocks: torch.Tensor) -> None:
        """Take over a file's blocks, uint8 `[out_features, row_bytes]`.

        Raises ExecutionError for others.
        """
        self.weight = nn.Parameter(native.pack(blocks, self.matrix), requires_grad=False)
        setattr(self.weight, "_is_hf_initialized", True)  # noqa: B010 - or transformers fills it anew

    def extra_repr(self) -> str:
        kind, out_features, in_features = self.matrix
        return f"in_features={in_features}, out_features={out_features}, blocks={kind}"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """A module can be moved; blocks are of no other dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for tensor in (self.weight, getattr(self, "bias", None)):
            if tensor is not None and tensor.dtype not in (torch.uint8, *DTYPES):
                raise ExecutionError(f"gguf computes in bfloat16 or float32, not {tensor.dtype}")
        return self


class GgufLinear(_InBlocks):
    """A linear layer; bfloat16 or float32 in and the same out, float32 sums.

    Attributes:
        int8: Activations are rounded to 8 bits (`native.linear`).
    """

    bias: torch.Tensor | None
    int8: bool = False

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None) -> None:
        super().__init__(matrix)
        _, self.out_features, self.in_features = matrix
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """`[..., in_features]` to `[..., out_features]`."""
        parameters = self._parameters  # attribute access through nn.Module costs more than the rest
        weight: Any = parameters["weight"]
        if not (input.is_cpu and weight.is_cpu) or input.requires_grad:
            return self._without_values(input, weight)
        if torch.compiler.is_compiling():
            return gguf_linear(input, weight, parameters["bias"], *self.matrix, self.int8)  # type: ignore[no-any-return]
        return native.linear(input, weight, parameters["bias"], self.matrix, self.int8)

    def _without_values(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        empty = hidden.is_cpu and weight.is_meta
        return shape_alone(self, hidden, "gguf", ["has no weights yet"] if empty else [])


class GgufEmbedding(_InBlocks):
    """An embedding, in `dtype`, times `embed_scale` where a model has one (Gemma)."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, embed_scale: float | None) -> None:
        super().__init__(matrix)
        _, self.num_embeddings, self.embedding_dim = matrix
        self.dtype = dtype
        # Rounded to the dtype once: a tensor made in `forward` would be a constant of a graph.
        self.embed_scale = (
            None
            if embed_scale is None
            else torch.tensor(embed_scale, dtype=dtype, device="cpu").item()
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Rows of ids `[...]`, `[..., embedding_dim]`."""
        weight = self.weight
        if input.is_meta:
            found = torch.empty(*input.shape, self.embedding_dim, dtype=self.dtype, device="meta")
        elif weight.is_meta or not (input.is_cpu and weight.is_cpu):
            raise ExecutionError(
                f"gguf: a layer of {self.extra_repr()} has its weights and its ids on the CPU alone"
            )
        elif torch.compiler.is_compiling():
            found = gguf_rows(input, weight, *self.matrix, self.dtype)
        else:
            found = native.rows(input, weight, self.matrix, self.dtype)
        if self.embed_scale is None:
            return found
        return found * self.embed_scale
