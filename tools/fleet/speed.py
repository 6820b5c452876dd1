"""How long a step takes: by what it reads and multiplies, on a device of a data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from jackfield import estimate
from jackfield.contracts.sizes import kv_bytes

#: Of what a data sheet promises. Guesses, until GPUs have been measured.
SHARE_OF_BANDWIDTH = 0.7
SHARE_OF_FLOPS = 0.5
#: Seconds of a step that are neither: the loop, launches, and sums over processes, per layer.
LOOP_SECONDS = 0.002
SUM_SECONDS = 12e-6


@dataclass(frozen=True)
class Speed:
    """What one replica can do. Bytes and FLOP are those of one of its devices.

    `room` is how many tokens its cache has room for.
    """

    weight_bytes: int
    token_bytes: int
    token_flops: int
    pair_flops: int
    room: int
    bandwidth: float
    flops: float
    fixed: float

    @classmethod
    def of(cls, config: object, *, device: str, tp_size: int, dtype: str = "bfloat16") -> Speed:
        """That of a model, as `jackfield memory` estimates it."""
        found = estimate(
            config, device_map=device, tp_size=tp_size, dtype=dtype, lengths=[4096],  # type: ignore[arg-type]
        )  # fmt: skip
        memory, needs, read = found.memory(), found.plan.requirements, found.bytes_read(0)
        if memory is None or found.prompt is None or read is None or found.flops is None:
            raise SystemExit("fleet: nobody can tell what this model takes")
        assert found.bandwidth is not None
        each = kv_bytes(needs, 1)
        free = found.device_memory - found.weight_bytes - found.step_bytes(4096)
        return cls(
            weight_bytes=read,
            token_bytes=each,
            token_flops=found.prompt.token,
            pair_flops=sum(pair for pair, _ in found.prompt.attentions),
            room=free // each,
            bandwidth=found.bandwidth * SHARE_OF_BANDWIDTH,
            flops=found.flops * SHARE_OF_FLOPS,
            fixed=LOOP_SECONDS + (2 * SUM_SECONDS * len(needs.windows) if tp_size > 1 else 0.0),
        )

    def step(self, fed: int, context: int, pairs: int) -> float:
        """Seconds of a step that feeds `fed` tokens to sequences of `context` tokens in all.

        `pairs` are (query, key) that the prompts among them compute.
        """
        read = (self.weight_bytes + context * self.token_bytes) / self.bandwidth
        computed = (fed * self.token_flops + pairs * self.pair_flops) / self.flops
        return self.fixed + max(read, computed)
