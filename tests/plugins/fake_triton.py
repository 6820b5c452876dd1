"""A GPU driver for Triton that runs nothing: it counts what is compiled, and holds launches to it.

Install it before any kernel is called, in a process where Triton does not interpret. Tensors lie in
host memory, which nobody reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.compiler
from triton.backends.compiler import GPUTarget

LAST_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)


@dataclass
class Launch:
    """One launch: of which kernel, its grid, and its arguments by name."""

    name: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


class Kernel:
    """What Triton's compiler returns here. It fails a launch that it was not compiled for."""

    def __init__(self, source: Any, launches: list[Launch]) -> None:
        names = list(source.signature)
        self._name, self._names, self._launches = source.fn.__name__, names, launches
        self.fixed = {names[at]: value for (at,), value in source.constants.items()}
        self.aligned = {names[at] for (at,), attributes in source.attrs.items() if attributes}
        self.declared = {p.name for p in source.fn.params if p.is_constexpr}

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*given: Any) -> None:
            arguments = dict(zip(self._names, given, strict=True))
            assert all(1 <= n <= last for n, last in zip(grid, LAST_GRID, strict=True)), grid
            for name, value in self.fixed.items():
                assert arguments[name] == value, f"{name} was compiled as {value}"
            for name in self.aligned:
                assert arguments[name] % 16 == 0, f"{name} was compiled as a multiple of 16"
            self._launches.append(Launch(self._name, grid, arguments))

        return run


@dataclass
class FakeDriver:
    """`compiled` has the kernels by name, `launches` every launch in order."""

    capability: int = 90
    compiled: list[tuple[str, Kernel]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def install(self) -> FakeDriver:
        triton.runtime.driver.set_active(self)
        triton.compiler.compile = self._compile
        return self

    def counts(self) -> Counter[str]:
        return Counter(name for name, _ in self.compiled)

    def _compile(self, src: Any, **_: Any) -> Kernel:
        kernel = Kernel(src, self.launches)
        self.compiled.append((src.fn.__name__, kernel))
        return kernel

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)
