"""What the kernels are compiled for, and what a compiled one is called with.

Everything that differs from step to step is an argument that Triton does not specialise on, so that
a shape of layers needs `prefill`, `decode` for single queries, `decode` for several and the sum of
splits, and nothing else, however long texts become. All are compiled together. Only where tokens of
images see one another there is another `prefill`, compiled when the first of them comes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from jackfield_plugins.attention.triton.kernels import (
    paged_decode,
    paged_prefill,
    sum_splits,
)
from jackfield_plugins.attention.triton.tiles import (
    DECODE_TILES,
    MAX_SPLITS,
    PREFILL_TILES,
    ROOMY,
    ROOMY_PREFILL_TILES,
    Tile,
    decode_limit,
    max_decode_rows,
    tile_for,
)
from jackfield_plugins.devices import on
from jackfield_plugins.launching import Run, is_compiled, overlapping, ready


class Shape(NamedTuple):
    """A shape of layers, by what is compiled into the kernels. Strides count numbers."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    window: int | None
    softcap: bool
    sinks: bool
    key_strides: tuple[int, ...]  # of a page, a slot and a head
    value_strides: tuple[int, ...]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def widest(self) -> tuple[int, int]:
        """The size of its widest block, and the bytes of a number in it."""
        return _block(max(self.head_dim, self.value_dim)), self.dtype.itemsize

    @property
    def wide(self) -> torch.dtype:
        """In what is summed up."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def dense(page_size: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """The strides of a pool whose numbers lie in a row."""
    return page_size * kv_heads * dim, kv_heads * dim, dim


def interpreted() -> bool:
    """Whether the kernels run under Triton's interpreter."""
    return not is_compiled(paged_decode)


_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _block(size: int) -> int:
    """The side of a tile: a power of two, at least the 16 that a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(size)))


def constants(shape: Shape) -> dict[str, Any]:
    """What prefill and decode have compiled in, in the order of their parameters."""
    # The interpreter keeps bfloat16 as bare bits and cannot multiply them.
    widened = interpreted() and shape.dtype == torch.bfloat16
    key_page, key_slot, key_head = shape.key_strides
    value_page, value_slot, value_head = shape.value_strides
    return {
        "KEY_PAGE": key_page, "KEY_SLOT": key_slot, "KEY_HEAD": key_head,
        "VALUE_PAGE": value_page, "VALUE_SLOT": value_slot, "VALUE_HEAD": value_head,
        "KV_HEADS": shape.kv_heads, "GROUP": shape.group,
        "USE_SOFTCAP": shape.softcap, "USE_SINKS": shape.sinks,
        "WINDOW": shape.window or 0, "PAGE_SIZE": shape.page_size,
        "HEAD_DIM": shape.head_dim, "VALUE_DIM": shape.value_dim,
        "BLOCK_D": _block(shape.head_dim), "BLOCK_V": _block(shape.value_dim),
        "COMPUTE": _DTYPES[shape.wide], "DOT": tl.float32 if widened else _DTYPES[shape.dtype],
    }  # fmt: skip


class Variant(NamedTuple):
    """A kernel with all that is compiled into it. `chunks` of a group's heads are programs each."""

    kernel: Any
    fixed: dict[str, Any]
    tile: Tile
    chunks: int = 1


def prefill_of(
    shape: Shape, tile: Tile | None = None, *, roomy: bool = False, ends: bool = False
) -> Variant:
    """`tile` None: the one that was chosen for the shape. `roomy`: there is much shared memory.

    `ends`: some queries see later keys.
    """
    fixed = constants(shape)
    tile = tile or tile_for(ROOMY_PREFILL_TILES if roomy else PREFILL_TILES, *shape.widest)
    chunks = triton.cdiv(shape.group, tile.rows)
    own = {"CHUNK": triton.cdiv(shape.group, chunks), "BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
    own["USE_ENDS"] = ends
    return Variant(paged_prefill, fixed | own, tile, chunks)


def decode_of(shape: Shape, queries: int, tile: Tile | None = None) -> Variant:
    """For sequences of up to `queries` queries. Of `tile` the rows do not count."""
    fixed = constants(shape)
    tile = tile or tile_for(DECODE_TILES, *shape.widest)
    chunks = triton.cdiv(shape.group, max_decode_rows(*shape.widest))
    chunk = triton.cdiv(shape.group, chunks)
    rows = _block(queries * chunk)
    own = {"QUERIES": queries, "CHUNK": chunk, "BLOCK_M": rows, "BLOCK_N": tile.keys}
    own["EARLY"] = False
    return Variant(paged_decode, fixed | own, tile, chunks)


def sum_of(shape: Shape) -> Variant:
    block = min(128, _block(shape.value_dim))
    fixed = {"VALUE_DIM": shape.value_dim, "BLOCK_V": block, "MAX_SPLITS": MAX_SPLITS}
    fixed["EARLY"] = False
    return Variant(sum_splits, fixed, Tile(1, 1, 4, 1))


def argument_type(shape: Shape, name: str) -> Any:
    """What stands for an argument while a kernel is compiled: a dtype for a tensor of it."""
    if name in ("query", "keys", "values", "sinks", "out"):
        return shape.dtype
    if name in ("parts", "lse"):
        return shape.wide
    if name in ("block_table", "first", "seq_lens", "cu_seqlens_q", "ends"):
        return torch.int32
    return 1.0 if name in ("scale", "softcap") else 16


def is_roomy(device: torch.device) -> bool:
    """Whether a program may have `ROOMY` of shared memory."""
    if device.type != "cuda":
        return False
    about = torch.cuda.get_device_properties(device)
    return int(getattr(about, "shared_memory_per_block_optin", 0)) >= ROOMY


class Variants:
    """The kernels for one shape of layers, compiled here and now for a device.

    `decode` takes sequences of up to as many queries as its key says: 1, or `limit`.
    """

    def __init__(self, shape: Shape, device: torch.device, tile: Tile | None = None) -> None:
        self.shape = shape
        self._device = device
        self.limit = decode_limit(shape.group, *shape.widest)
        self._tile = tile
        self._roomy = is_roomy(device)
        prefill = prefill_of(shape, tile, roomy=self._roomy)
        self.prefill = self._run(prefill)
        self.prefill_chunks = prefill.chunks
        self.prefill_queries = prefill.fixed["BLOCK_M"] // prefill.fixed["CHUNK"]
        decode = {queries: decode_of(shape, queries, tile) for queries in (1, self.limit)}
        self.decode = {queries: self._run(variant) for queries, variant in decode.items()}
        self.decode_chunks = decode[1].chunks
        self.decode_keys = decode[1].fixed["BLOCK_N"]
        total = sum_of(shape)
        self.sum = self._run(total)
        self.sum_block = total.fixed["BLOCK_V"]

    @cached_property
    def prefill_with_ends(self) -> Run:
        """For steps in which some queries see later keys."""
        return self._run(prefill_of(self.shape, self._tile, roomy=self._roomy, ends=True))

    def _run(self, variant: Variant) -> Run:
        kernel, fixed, tile, _ = variant
        names = getattr(kernel, "arg_names", ())
        types = {name: argument_type(self.shape, name) for name in names if name not in fixed}
        sizes = {"num_warps": tile.warps, "num_stages": tile.stages}
        if fixed.get("QUERIES", 1) == 1 and "EARLY" in fixed:  # which steps are recorded with
            return overlapping(kernel, types, fixed, self._device, **sizes)
        with on(self._device):  # Triton compiles for the current one
            return ready(kernel, types, fixed, **sizes)
