"""How much of the work a program takes: tiles, splits, and which rows are decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: Sequences with up to this many queries (drafts to verify) are decode, if their rows fit a tile.
MAX_DECODE_QUERIES = 8
MAX_SPLITS = 64

#: Programs per multiprocessor that decode aims at: enough loads in flight to fill the memory bus.
PROGRAMS_PER_PROCESSOR = 2


class Tile(NamedTuple):
    """Rows (queries × heads of a group) and keys that one program holds at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


#: By bytes of a number, the tile for heads up to a size, by what the compiler says of them (a test
#: compiles all for compute capabilities 8.0, 9.0 and 10.0): a few bytes of a thread at most are
#: spilled, and shared memory stays within the 99 KiB that every GPU from 8.0 on gives a program.
#: Stages beyond 3 change nothing, as a key's address comes out of the block table: the third loads
#: that table ahead. Float32 has no matrix unit that keeps its precision, so its tiles are smaller.
PREFILL_TILES = {
    2: {
        64: Tile(128, 64, 8, 2),
        128: Tile(128, 64, 8, 2),
        256: Tile(64, 32, 8, 3),
        512: Tile(32, 32, 8, 2),
    },
    4: {
        64: Tile(32, 32, 8, 2),
        128: Tile(32, 16, 8, 2),
        256: Tile(32, 16, 8, 2),
        512: Tile(16, 16, 8, 1),
    },
    8: {512: Tile(16, 16, 4, 1)},
}
#: Shared memory of a program, in bytes, that some GPUs have: 227 KiB on 9.0 and 10.0.
ROOMY = 200 * 1024
#: There, attention of prompts with heads of 256 is 2.2 times as fast (NVIDIA H200, bfloat16).
ROOMY_PREFILL_TILES = {**PREFILL_TILES, 2: {**PREFILL_TILES[2], 256: Tile(128, 32, 8, 2)}}
#: Their rows are as many as `max_decode_rows` at most.
DECODE_TILES = {
    2: {
        16: Tile(16, 64, 4, 3),
        64: Tile(16, 64, 8, 3),
        128: Tile(16, 64, 4, 3),
        256: Tile(16, 32, 8, 3),
        512: Tile(16, 32, 8, 3),
    },
    4: {
        64: Tile(16, 64, 8, 3),
        128: Tile(16, 16, 8, 3),
        256: Tile(16, 16, 8, 3),
        512: Tile(16, 16, 8, 2),
    },
    8: {512: Tile(16, 16, 4, 1)},
}


def tile_for(tiles: Mapping[int, Mapping[int, Tile]], head_dim: int, itemsize: int) -> Tile:
    """The tile of the smallest class that heads of this size fit in."""
    return next(tile for size, tile in tiles[itemsize].items() if head_dim <= size)


def max_decode_rows(head_dim: int, itemsize: int) -> int:
    """How many rows of such heads a program has room for beside its keys."""
    return max(16, min(64, 2**15 // (head_dim * itemsize)))


def decode_limit(group: int, head_dim: int, itemsize: int) -> int:
    """The most queries of a sequence that count as decode; a power of two."""
    fit = max(1, max_decode_rows(head_dim, itemsize) // group)
    return min(MAX_DECODE_QUERIES, 1 << (fit.bit_length() - 1))


def choose_splits(programs: int, longest: int, keys_per_tile: int, processors: int) -> int:
    """How many programs share the keys of a sequence: enough to occupy every multiprocessor.

    A power of two. `programs` there are without splits, `longest` is the most keys that a sequence
    sees. A split has at least two tiles, so that the sum over splits stays the smaller part of the
    work. Nearly as many programs as are aimed at are enough: the sum would take longer.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // programs
    most = max(1, min(wanted, longest // (2 * keys_per_tile), MAX_SPLITS))
    return 1 << (most.bit_length() - 1)
