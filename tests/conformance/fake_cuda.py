"""GPUs that are not there: what torch.cuda would say of them, for plans, sizes and launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest


@dataclass
class Gpu:
    """What the driver and torch's allocator say of one GPU, in bytes.

    `free` is the driver's; torch has `reserved` of the rest, and tensors have `allocated` of that;
    `between` is what torch cannot give back, as tensors lie around it.
    """

    free: int = 80 * 10**9
    reserved: int = 0
    allocated: int = 0
    between: int = 0
    capability: tuple[int, int] = (9, 0)
    total: int = 80 * 10**9


@dataclass
class FakeCuda:
    """`gpus` in place of this machine's; `entered` are the devices that were made the current one.

    The first one is the current device, and what is asked of "cuda" without a number.
    """

    gpus: list[Gpu] = field(default_factory=lambda: [Gpu()])
    entered: list[int] = field(default_factory=list)
    current: int = 0

    def number(self, device: Any = None) -> int:
        if isinstance(device, str | torch.device):
            device = torch.device(device).index
        return self.current if device is None else int(device)

    def of(self, device: Any = None) -> Gpu:
        return self.gpus[self.number(device)]

    def properties(self, device: Any = None) -> SimpleNamespace:
        gpu = self.of(device)
        major, minor = gpu.capability
        return SimpleNamespace(
            multi_processor_count=132, major=major, minor=minor, total_memory=gpu.total
        )

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self.number(device)
        self.entered.append(self.current)
        try:
            yield
        finally:
            self.current = before

    def empty_cache(self) -> None:
        """Give back what lies between no tensors."""
        for gpu in self.gpus:
            back = max(0, gpu.reserved - gpu.allocated - gpu.between)
            gpu.free, gpu.reserved = gpu.free + back, gpu.reserved - back

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        """Have torch.cuda answer for these GPUs; tensors on them cannot be made."""
        said: dict[str, Any] = {
            "is_available": lambda: bool(self.gpus),
            "device_count": lambda: len(self.gpus),
            "current_device": lambda: self.current,
            "device": self.device,
            "mem_get_info": lambda device=None: (self.of(device).free, self.of(device).total),
            "empty_cache": self.empty_cache,
            "memory_allocated": lambda device=None: self.of(device).allocated,
            "get_device_capability": lambda device=None: self.of(device).capability,
            "get_device_properties": self.properties,
            "is_current_stream_capturing": lambda: False,
        }
        for name, answer in said.items():
            patch.setattr(torch.cuda, name, answer)
        return self
