"""What the kernels take, in words and as a check."""

from __future__ import annotations

from typing import NamedTuple

import torch

NAME = "cpu_decode"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PACKED = (
    "query [tokens, heads, head_dim], keys and values [pages, page_size, kv_heads, …] of one size "
    "whose heads are dense, heads a multiple of kv_heads"
)
ALIKE = "query, keys and values of one dtype of 16, 32 or 64 bits on the CPU"
MEMORY = "tensors that have memory"
TABLES = "dense int32 on the CPU: table [rows, pages], first and lengths [rows], starts [rows + 1]"


class Rows(NamedTuple):
    """What the kernel reads of a step: a row is one query, or a sequence of too many, left out.

    All int32: `table` `[rows, pages]`, `first` and `lengths` `[rows]`, `starts` `[rows + 1]`.
    """

    table: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor


def are_tables(rows: Rows) -> bool:
    """Whether a kernel can read the tables of a step."""
    table, count = rows.table, rows.lengths.numel()
    if table.dim() != 2:
        return False
    shapes = ((count, table.shape[1]), (count,), (count,), (count + 1,))
    return all(
        tensor.dtype is torch.int32
        and tensor.is_cpu
        and tensor.shape == shape
        and (tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride(1) == 1))
        for tensor, shape in zip(rows, shapes, strict=True)
    )
