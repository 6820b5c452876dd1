"""Compile the kernels of linear layers for GPUs that need not be there; print how they load.

Run by a test in a process of its own, as Triton decides when it is imported whether to interpret.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from typing import Any

from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jackfield_plugins.kernel.triton_one_row.kernels import (
    gated_kernel,
    linear_kernel,
    times_kernel,
)

CAPABILITIES = (80, 90, 100)
ALIGNED = ("x", "weight", "other", "out", "outputs")
SHAPES = ((1, 2048, 4096), (2, 1024, 14336), (2, 1024, 896), (2, 64, 40))  # outputs, block, size


def main() -> None:
    kernels, dtypes = (linear_kernel, gated_kernel), ("bf16", "fp16", "fp32")
    for kernel, dtype, capability in itertools.product(kernels, dtypes, CAPABILITIES):
        for each, block, size in SHAPES:
            fixed = {
                "SIZE": size,
                "OTHER": True,
                "OUT": each,
                "BLOCK": block,
                "EARLY": capability >= 90,
            }
            names = kernel.arg_names
            kinds = {name: "constexpr" if name in fixed else f"*{dtype}" for name in names}
            source = ASTSource(
                kernel,
                {**kinds, "outputs": "i32"},
                {(names.index(name),): value for name, value in fixed.items()},
                {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
            )
            told(kernel, source, capability, size)
    for dtype, capability in itertools.product(dtypes, CAPABILITIES):
        kinds = dict.fromkeys(("gate", "up", "out"), f"*{dtype}")
        source = ASTSource(
            times_kernel,
            {**kinds, "count": "i32", "BLOCK": "constexpr"},
            {(4,): 1024},
            {(i,): [["tt.divisibility", 16]] for i in range(4)},
        )
        told(times_kernel, source, capability, 1024)


def told(kernel: Any, source: ASTSource, capability: int, size: int) -> None:
    made = compile_for(source, target=GPUTarget("cuda", capability, 32))
    loads = re.findall(r"ld\.global\S*v4", made.asm["ptx"])
    line = {"kernel": kernel.__name__, "size": size, "wide": len(loads)}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
