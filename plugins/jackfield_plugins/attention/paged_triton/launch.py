"""From a `PackedLayer` to kernel launches: tile sizes, splits, and which rows are decode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from jackfield.contracts import PackedLayer, Span
from jackfield_plugins.attention.paged_triton.kernels import (
    paged_decode,
    paged_prefill,
    sum_splits,
)

#: Sequences with up to this many queries (drafts to verify) are decode, if their rows fit a tile.
MAX_DECODE_QUERIES = 8
MAX_DECODE_ROWS = 64
MAX_SPLITS = 64

#: Programs per multiprocessor that decode aims at: enough loads in flight to fill the memory bus.
PROGRAMS_PER_PROCESSOR = 2


class Tile(NamedTuple):
    """Rows (queries × heads of a group) and keys that one program holds at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


#: By bytes of an element, the tile for heads up to a size: such that on compute capabilities 8.0
#: and 9.0 hardly a register is spilled and shared memory stays below 100 KiB (a test compiles
#: them). Float32 has no matrix unit that keeps its precision, so its tiles are smaller.
PREFILL_TILES = {
    2: {128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2), 512: Tile(32, 16, 4, 1)},
    4: {64: Tile(64, 32, 8, 2), 128: Tile(64, 16, 8, 2), 512: Tile(16, 16, 4, 1)},
    8: {512: Tile(16, 16, 4, 1)},
}
DECODE_TILES = {
    2: {128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 3), 512: Tile(16, 16, 4, 1)},
    4: {64: Tile(16, 64, 4, 3), 512: Tile(16, 16, 4, 1)},
    8: {512: Tile(16, 16, 4, 1)},
}


def tile_for(tiles: Mapping[int, Mapping[int, Tile]], head_dim: int, itemsize: int) -> Tile:
    """The tile of the smallest class that heads of this size fit in."""
    return next(tile for size, tile in tiles[itemsize].items() if head_dim <= size)


def decode_limit(group: int) -> int:
    """The most queries of a sequence that count as decode; a power of two."""
    fit = max(1, MAX_DECODE_ROWS // group)
    return min(MAX_DECODE_QUERIES, 1 << (fit.bit_length() - 1))


def choose_splits(programs: int, longest: int, keys_per_tile: int, processors: int) -> int:
    """How many programs share the keys of a sequence: enough to occupy every multiprocessor.

    `programs` there are without splits, `longest` is the most keys that a sequence sees. A split
    has at least two tiles, so that the sum over splits stays the smaller part of the work.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // programs)
    return max(1, min(wanted, longest // (2 * keys_per_tile), MAX_SPLITS))


def paged_attention(
    query: torch.Tensor,
    layer: PackedLayer,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Causal attention of `query` `[tokens, heads, head_dim]` to the pages of `layer`.

    Returns `[tokens, heads, value_dim]`, contiguous. `sinks` is `[heads]`. `num_splits` and `tile`
    are chosen here where they are not given.
    """
    heads, kv_heads = query.shape[1], layer.keys.shape[2]
    query = query if query.stride(2) == 1 else query.contiguous()
    out = query.new_empty(*query.shape[:2], layer.values.shape[3])
    lengths = [span.length for span in layer.step.spans]
    limit = decode_limit(heads // kv_heads)
    short = max((n for n in lengths if n <= limit), default=0)
    short = triton.next_power_of_2(short) if short else 0
    constants = _constants(query, layer, scaling, softcap, sinks)
    with _on(query.device):
        if short < max(lengths):
            _prefill(query, layer, out, sinks, short, constants, tile)
        if short:
            _decode(query, layer, out, sinks, short, constants, tile, num_splits)
    return out


def _constants(
    query: torch.Tensor,
    layer: PackedLayer,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> dict[str, Any]:
    """What is compiled into the kernels: a constant of the model each."""
    double = query.dtype == torch.float64
    # The interpreter keeps bfloat16 as bare bits and cannot multiply them.
    widened = interpreted() and query.dtype == torch.bfloat16
    return {
        "GROUP": query.shape[1] // layer.keys.shape[2],
        "SCALE": scaling,
        "SOFTCAP": softcap or 0.0,
        "WINDOW": layer.window or 0,
        "USE_SINKS": sinks is not None,
        "PAGE_SIZE": layer.page_size,
        "HEAD_DIM": query.shape[2],
        "VALUE_DIM": layer.values.shape[3],
        "BLOCK_D": _block(query.shape[2]),
        "BLOCK_V": _block(layer.values.shape[3]),
        "COMPUTE": tl.float64 if double else tl.float32,
        "DOT": tl.float32 if widened else _DTYPES[query.dtype],
    }


_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _block(size: int) -> int:
    """The side of a tile: a power of two, at least the 16 that a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(size)))


def _tensors(
    query: torch.Tensor, layer: PackedLayer, out: torch.Tensor, sinks: torch.Tensor | None
) -> dict[str, Any]:
    """The arguments that prefill and decode have in common."""
    step, keys, values = layer.step, layer.keys, layer.values
    return {
        "query": query, "keys": keys, "values": values, "out": out,
        "sinks": query if sinks is None else sinks.contiguous(),
        "block_table": layer.block_table, "first": layer.first,
        "seq_lens": step.seq_lens, "cu_seqlens_q": step.cu_seqlens_q,
        "query_token": query.stride(0), "query_head": query.stride(1),
        "key_page": keys.stride(0), "key_slot": keys.stride(1), "key_head": keys.stride(2),
        "value_page": values.stride(0), "value_slot": values.stride(1),
        "value_head": values.stride(2),
        "out_token": out.stride(0), "table_row": layer.block_table.stride(0),
    }  # fmt: skip


def _prefill(
    query: torch.Tensor,
    layer: PackedLayer,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    short: int,
    constants: dict[str, Any],
    tile: Tile | None,
) -> None:
    group = constants["GROUP"]
    tile = tile or tile_for(PREFILL_TILES, _widest(constants), query.element_size())
    rows = max(tile.rows, int(triton.next_power_of_2(group)))
    tiles = triton.cdiv(layer.step.max_query_length, rows // group)
    grid = (tiles, layer.keys.shape[2], len(layer.step.spans))
    paged_prefill[grid](
        **_tensors(query, layer, out, sinks), **constants, short=short,
        BLOCK_M=rows, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _decode(
    query: torch.Tensor,
    layer: PackedLayer,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    queries: int,
    constants: dict[str, Any],
    tile: Tile | None,
    num_splits: int | None,
) -> None:
    heads, kv_heads, sequences = query.shape[1], layer.keys.shape[2], len(layer.step.spans)
    tile = tile or tile_for(DECODE_TILES, _widest(constants), query.element_size())
    rows = max(16, int(triton.next_power_of_2(queries * constants["GROUP"])))
    short = [span for span in layer.step.spans if span.length <= queries]
    splits = num_splits or choose_splits(
        len(short) * kv_heads, _longest(short, layer.window), tile.keys, _processors(query.device)
    )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = (splits if splits > 1 else 0, sequences, queries, heads)
    lse = query.new_empty(shape, dtype=wide)
    parts = query.new_empty(*shape, out.shape[2], dtype=wide)
    paged_decode[kv_heads, sequences, splits](
        **_tensors(query, layer, out, sinks), **constants, parts=parts, lse=lse,
        QUERIES=queries, SPLIT=splits > 1,
        BLOCK_M=rows, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        sum_splits[heads, sequences * queries](
            parts, lse, out, layer.step.cu_seqlens_q, out.stride(0), splits,
            QUERIES=queries, VALUE_DIM=out.shape[2],
            BLOCK_S=triton.next_power_of_2(splits), BLOCK_V=constants["BLOCK_V"], num_warps=4,
        )  # fmt: skip


def _widest(constants: dict[str, Any]) -> int:
    return int(max(constants["BLOCK_D"], constants["BLOCK_V"]))


def _longest(spans: Iterable[Span], window: int | None) -> int:
    """The most keys that one of these sequences sees."""
    return max(
        span.end if window is None else min(span.end, window + span.length - 1) for span in spans
    )


def interpreted() -> bool:
    """Whether the kernels run under Triton's interpreter: decided when they were defined."""
    return "Interpreted" in type(paged_decode).__name__


def kernels_in_use() -> str:
    """What reports say."""
    how = ", interpreted" if interpreted() else ""
    return (
        f"{paged_prefill.__name__} and {paged_decode.__name__} of Triton {triton.__version__}{how}"
    )


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter runs programs one after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
