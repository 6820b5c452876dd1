"""Compile the Triton attention for GPUs that need not be there; print what each kernel takes.

Run by a test in a process of its own, as Triton decides when it is imported whether to interpret.
Arguments: compute capabilities, dtypes, head sizes, each joined by commas.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jackfield_plugins.attention.paged_triton import kernels
from jackfield_plugins.attention.paged_triton.launch import DECODE_TILES, PREFILL_TILES, tile_for

DTYPES = {"bf16": (tl.bfloat16, 2), "fp16": (tl.float16, 2), "fp32": (tl.float32, 4)}
INDICES = {"block_table", "first", "seq_lens", "cu_seqlens_q"}
PARTIAL = {"parts", "lse"}
STRIDES = {"query_token", "query_head", "key_page", "key_slot", "key_head", "value_page",
           "value_slot", "value_head", "out_token"}  # fmt: skip
TENSORS = {"query", "keys", "values", "sinks", "out"}


def signature(names: list[str], constants: dict[str, Any], dtype: str) -> dict[str, str]:
    kinds = dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(TENSORS, f"*{dtype}") | dict.fromkeys(INDICES, "*i32")
    kinds |= dict.fromkeys(PARTIAL, "*fp32")
    return {name: kinds.get(name, "i32") for name in names}


def resources(ptx: str, capability: int) -> dict[str, int]:
    """Registers and spilled bytes of a thread, from NVIDIA's assembler (part of Triton's wheel)."""
    assembler = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*"))
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        done = subprocess.run(
            [assembler, "-v", f"--gpu-name={arch}", source.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    spilled = re.findall(r"(\d+) bytes spill stores", done.stderr)
    return {
        "registers": int(re.findall(r"Used (\d+) registers", done.stderr)[0]),
        "spilled": max(map(int, spilled), default=0),
    }


def compile_one(
    kernel: Any, constants: dict[str, Any], dtype: str, capability: int, **options: int
) -> dict[str, Any]:
    names = kernel.arg_names
    types = signature(names, {k: v for k, v in constants.items() if k in names}, dtype)
    aligned = [n for n in names if n in STRIDES or types[n].startswith("*")]
    source = ASTSource(
        kernel,
        types,
        {(i,): constants[n] for i, n in enumerate(names) if types[n] == "constexpr"},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__, "dtype": dtype, "head_dim": constants["VALUE_DIM"],
        "capability": capability, "shared": made.metadata.shared, "matrix_unit": "mma" in ptx,
        **resources(ptx, capability),
    }  # fmt: skip


def main(capabilities: str, dtypes: str, head_dims: str) -> None:
    cases = itertools.product(capabilities.split(","), dtypes.split(","), head_dims.split(","))
    for capability, dtype, head_dim in cases:
        kind, itemsize = DTYPES[dtype]
        block = triton.next_power_of_2(int(head_dim))
        constants = {
            "GROUP": 4, "SCALE": 0.125, "SOFTCAP": 50.0, "WINDOW": 1000, "USE_SINKS": True,
            "PAGE_SIZE": 32, "HEAD_DIM": int(head_dim), "VALUE_DIM": int(head_dim),
            "BLOCK_D": block, "BLOCK_V": block, "COMPUTE": tl.float32, "DOT": kind,
            "QUERIES": 1, "SPLIT": True, "BLOCK_S": 32,
        }  # fmt: skip
        for kernel, tiles in (
            (kernels.paged_prefill, PREFILL_TILES),
            (kernels.paged_decode, DECODE_TILES),
        ):
            tile = tile_for(tiles, block, itemsize)
            sides = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            found = compile_one(kernel, constants | sides, dtype, int(capability), **options)
            sys.stdout.write(json.dumps(found) + "\n")
        found = compile_one(kernels.sum_splits, constants, dtype, int(capability))
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
