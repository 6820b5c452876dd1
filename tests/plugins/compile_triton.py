"""Compile the Triton attention for GPUs that need not be there; print what each kernel takes.

Run by a test in a process of its own, as Triton decides when it is imported whether to interpret.
Arguments: compute capabilities, dtypes, head sizes, groups, each joined by commas.
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

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jackfield_plugins.attention.triton import variants
from jackfield_plugins.attention.triton.variants import Shape, Variant, dense

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {torch.int32: "*i32"} | {dtype: f"*{name}" for name, dtype in DTYPES.items()}


def shape_of(dtype: str, head_dim: int, group: int) -> Shape:
    """With all that an attention can have, which takes the most registers."""
    strides = dense(32, 2, head_dim)
    return Shape(
        DTYPES[dtype], 2 * group, 2, head_dim, head_dim, 32, 1000, True, True, strides, strides
    )


def is_roomy(capability: int) -> bool:
    """Whether a program may have 227 KiB of shared memory there, and not 99."""
    return capability in (90, 100)


def all_of(shape: Shape, capability: int) -> list[Variant]:
    roomy = is_roomy(capability)
    limit = variants.decode_limit(shape.group, *shape.widest)
    decode = [variants.decode_of(shape, queries) for queries in sorted({1, limit})]
    prefill = [variants.prefill_of(shape, roomy=roomy, ends=ends) for ends in (False, True)]
    return [*prefill, *decode, variants.sum_of(shape)]


def assembled(ptx: str, capability: int) -> dict[str, int]:
    """Registers, spilled bytes and local memory of a thread, from NVIDIA's assembler.

    Triton's wheel brings it, and another one for Blackwell.
    """
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    blackwell = folder / "ptxas-blackwell"
    assembler = blackwell if capability >= 100 and blackwell.exists() else folder / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        done = subprocess.run(
            [assembler, "-v", f"--gpu-name={arch}", source.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    stores = re.findall(r"(\d+) bytes spill stores", done.stderr)
    loads = re.findall(r"(\d+) bytes spill loads", done.stderr)
    return {
        "registers": int(re.findall(r"Used (\d+) registers", done.stderr)[0]),
        "spilled": max(map(int, stores + loads), default=0),
    }


def compiled(shape: Shape, variant: Variant, capability: int) -> dict[str, Any]:
    kernel, fixed, tile, _ = variant
    names = kernel.arg_names

    def kind(name: str) -> str:
        if name in fixed:
            return "constexpr"
        given = variants.argument_type(shape, name)
        return NAMES.get(given, "fp32" if isinstance(given, float) else "i32")

    types = {name: kind(name) for name in names}
    skipped = kernel.do_not_specialize_on_alignment
    aligned = [n for n in names if types[n].startswith("*") and n not in skipped]
    source = ASTSource(
        kernel,
        types,
        {(i,): fixed[name] for i, name in enumerate(names) if name in fixed},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__, "dtype": str(shape.dtype), "head_dim": shape.head_dim,
        "group": shape.group, "queries": fixed.get("QUERIES"), "rows": fixed.get("BLOCK_M"),
        "tile": [*tile], "capability": capability, "shared": made.metadata.shared,
        "most_shared": (227 if is_roomy(capability) else 99) * 1024,
        "matrix_unit": bool(re.search(r"\bmma\.|wgmma|tcgen05\.mma", ptx)),
        "vectors": bool(re.search(r"cp\.async\.cg|ld\.global[.\w:]*\.v4|ld\.global\.v4", ptx)),
        **assembled(ptx, capability),
    }  # fmt: skip


def main(capabilities: str, dtypes: str, head_dims: str, groups: str) -> None:
    cases = itertools.product(
        capabilities.split(","), dtypes.split(","), head_dims.split(","), groups.split(",")
    )
    for capability, dtype, head_dim, group in cases:
        shape = shape_of(dtype, int(head_dim), int(group))
        for variant in all_of(shape, int(capability)):
            sys.stdout.write(json.dumps(compiled(shape, variant, int(capability))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
