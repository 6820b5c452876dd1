"""What every stage is handed: a device, sizes, and where results go."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpucheck.results import Results
from gpucheck.sizes import Sizes


class Gpu:
    """A CUDA device. Seconds are those of the device's own clock."""

    profiled = torch.profiler.ProfilerActivity.CUDA

    def __init__(self, name: str = "cuda") -> None:
        self.name = name

    @property
    def model(self) -> str:
        return torch.cuda.get_device_name(self.name)

    def wait(self) -> None:
        torch.cuda.synchronize(self.name)

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long the device works on what `run` has it do."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        self.wait()
        return begin.elapsed_time(end) / 1000

    def lost(self) -> bool:
        """Whether it does nothing more for this process."""
        try:
            self.wait()
        except RuntimeError:
            return True
        return False

    def held(self) -> int:
        """Bytes that torch has from the driver."""
        return torch.cuda.memory_reserved(self.name)

    def peak_bandwidth(self) -> float | None:
        """Bytes a second by the memory's clock and width; None where torch does not tell."""
        about = torch.cuda.get_device_properties(self.name)
        clock, width = (
            getattr(about, name, 0) for name in ("memory_clock_rate", "memory_bus_width")
        )
        return 2 * clock * 1000 * width / 8 or None

    def works(self, event: Any) -> bool:
        """Whether an event of the profiler is work of the device.

        A compiled region spans on the device's clock what is launched in it, and is no work itself.
        """
        of_device = event.device_type == torch.autograd.DeviceType.CUDA
        return of_device and not event.is_user_annotation

    @contextlib.contextmanager
    def waits(self) -> Iterator[Counter[str]]:
        """Counts by source line what makes the host wait for the device, whichever thread waits.

        torch tells of copies and reads that block; events, streams and whole devices that are
        waited for are counted here. An event that has come, and a stream that has nothing to do,
        are asked and not waited for: a block of numbers is written again behind its last copy.
        """
        found: Counter[str] = Counter()
        with warnings.catch_warnings(), contextlib.ExitStack() as patched:
            warnings.simplefilter("always")

            def told(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
                if "synchronizing CUDA" in str(message):
                    found[f"{filename.rpartition('site-packages/')[2]}:{lineno}"] += 1

            warnings.showwarning = told
            for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
                method = owner.synchronize
                patched.callback(setattr, owner, "synchronize", method)
                name = f"{owner.__name__}.synchronize"
                setattr(owner, "synchronize", _counted(method, name, found))  # noqa: B010
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)


def _counted(method: Callable[..., Any], name: str, found: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        done = bool(args) and hasattr(args[0], "query") and args[0].query()
        if not done:
            found[name] += 1
        return method(*args, **kwargs)

    return counted


class Host:
    """The processor in the place of a GPU, for the test that runs every stage."""

    profiled = torch.profiler.ProfilerActivity.CPU
    name = "cpu"
    model = "the CPU"

    def wait(self) -> None:
        """Nothing to wait for."""

    def lost(self) -> bool:
        return False

    def seconds(self, run: Callable[[], Any]) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def held(self) -> int:
        return 0

    def peak_bandwidth(self) -> float | None:
        return None

    def works(self, event: Any) -> bool:
        return not event.cpu_children

    @contextlib.contextmanager
    def waits(self) -> Iterator[Counter[str]]:
        yield Counter()


@dataclass(frozen=True)
class Bench:
    """What a stage works with."""

    device: Gpu | Host
    sizes: Sizes
    results: Results
