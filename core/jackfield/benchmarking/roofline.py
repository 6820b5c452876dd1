"""The least that a workload takes of a device: bytes that must be read, products to be computed.

Of tokens that are chosen one after the other, each step reads all weights, and every sequence's
keys and values; of prompts and new tokens each is multiplied with every weight. Divided by what the
device reads and multiplies in a second, these are times that no program can beat that reads this
model so: memory or compute, whichever is longer, is the roof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jackfield.benchmarking.workload import Request
from jackfield.units import in_units

if TYPE_CHECKING:
    from jackfield.bridge.prompt_flops import PromptFlops
    from jackfield.estimates.estimate import Estimate


@dataclass(frozen=True)
class Limits:
    """What a round must read and multiply, in bytes and operations, and what a device can in a
    second. `where` is the device and the dtype.
    """

    where: str
    bytes_read: int
    flops: int
    bandwidth: float
    flop_rate: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}

    @property
    def seconds(self) -> float:
        """What a round takes at least."""
        return max(self.bytes_read / self.bandwidth, self.flops / self.flop_rate)


def shares(limits: Mapping[str, float], seconds: float) -> tuple[float, float]:
    """The shares of the device's bandwidth and of its operations that a round of `seconds` took."""
    memory = limits["bytes_read"] / limits["bandwidth"] / seconds
    return memory, limits["flops"] / limits["flop_rate"] / seconds


def told(limits: Mapping[str, Any]) -> str:
    """What shares are of: "32.6 GB/s and 411 GFLOP/s (cpu bfloat16)"."""
    bandwidth, flops = in_units(int(limits["bandwidth"])), limits["flop_rate"] / 1e9
    return f"{bandwidth}/s and {flops:,.0f} GFLOP/s ({limits['where']})"


def limits(
    requests: Sequence[Request],
    arguments: Mapping[str, Any],
    batch: int,
    rates: Mapping[str, tuple[float, float]],
) -> dict[str, Any] | None:
    """Those of a round with this selection on its device; None where they are unknown.

    `batch` requests run together at most. `rates` has what is known already, bandwidth and
    operations a second by device and dtype; what is not is measured, in about two seconds.
    """
    from jackfield.bridge.bandwidth import measure_bandwidth, measure_flops
    from jackfield.errors import JackfieldError
    from jackfield.estimates.estimating import estimate

    longest = max(len(one.prompt) + one.new_tokens for one in requests)
    given = {key: value for key, value in arguments.items() if key in _COUNTED}
    try:
        found = estimate(arguments["model"], lengths=[longest], prompt_flops=True, **given)
        device, dtype = found.plan.device or "cpu", found.plan.requirements.dtype
        # Processes that share a model have a device each, but for CPUs.
        devices = 1 if device == "cpu" else arguments.get("tp_size") or 1
        where = f"{devices} x {device} {dtype}" if devices > 1 else f"{device} {dtype}"
        rate = rates.get(where)
        if rate is None:
            one = measure_bandwidth(device), measure_flops(device, dtype)
            rate = devices * one[0], devices * one[1]
    except JackfieldError:  # a model that is spread, or has no such numbers; or no room to measure
        return None
    read, flops = _bytes_read(requests, found, batch), _flops(requests, found.prompt)
    return None if read is None or flops is None else Limits(where, read, flops, *rate).to_dict()


_COUNTED = (
    "attn_implementation", "cache_implementation", "quantization", "compile", "scheduler",
    "kernels", "dtype", "device_map", "revision", "deterministic",
)  # fmt: skip


def _bytes_read(requests: Sequence[Request], found: Estimate, batch: int) -> int | None:
    """Weights once a step, in as few steps as there can be, and each sequence's keys and values."""
    weights = found.bytes_read(0)
    if weights is None:
        return None
    left = sorted((one.new_tokens for one in requests), reverse=True)
    steps = max(left[0], -(-sum(left) // batch))
    kept = 0
    for one in requests:
        for tokens in range(len(one.prompt), len(one.prompt) + one.new_tokens):
            kept += (found.bytes_read(tokens) or 0) - weights
    return steps * weights + kept


def _flops(requests: Sequence[Request], prompt: PromptFlops | None) -> int | None:
    """Each request's tokens but the last, as if they were one prompt, and the logits of each."""
    if prompt is None:
        return None
    return sum(
        prompt.of(len(one.prompt) + one.new_tokens - 1) + (one.new_tokens - 1) * prompt.once
        for one in requests
    )
