"""What an estimate says: bytes of weights, cache and steps, and what a step reads."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.bridge.prompt_flops import PromptFlops
from jackfield.bridge.step_reads import StepReads
from jackfield.contracts import Requirements
from jackfield.contracts.requirements import BYTES
from jackfield.estimates.backend_sizes import (
    CacheBytes,
    WeightBytes,
)
from jackfield.planning.memory import CacheMemory
from jackfield.planning.planning import Plan

#: Where a model has no limit of its own, the longest context that is looked at, in tokens.
FAR = 131072


@dataclass(frozen=True)
class StepBytes:
    """What steps take at their peak beside weights and cache, in bytes, logits included.

    `tokens` is how long the request is; `prefill` feeds `fed` of them, the last ones, and `decode`
    one.
    """

    tokens: int
    fed: int
    prefill: int
    decode: int


@dataclass(frozen=True)
class Estimate:
    """What a plan takes of a device of `device_memory` bytes. Numbers are bytes.

    `dtypes` is what weights take that are not quantized. `steps` were probed, those of `lengths`
    among them; there are none where the model's code does not run without numbers, and `reads` is
    then None.
    `weights_known` is false where the chosen quantizer does not say what its weights take; they
    count as if not quantized. `checkpoint_bytes` is what a checkpoint in the dtype of its config
    takes, not quantized. `pool` is the cache's memory where its options fix it.
    `bandwidth` is in bytes a second, None where nobody gave or measured it. `flops` is how many
    multiplications and additions of 16-bit numbers a device does a second, and `prompt` what
    reading a prompt takes; None: unknown. Sizes and limits are those of one of `replicas` engines,
    and of one of the processes that share its model.
    """

    plan: Plan
    device_memory: int
    given: bool
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    dtypes: Mapping[str, int]
    weights: tuple[WeightBytes, ...]
    caches: tuple[CacheBytes, ...]
    steps: tuple[StepBytes, ...]
    reads: StepReads | None
    weights_known: bool
    checkpoint_bytes: int
    pool: int | None
    step_limit: int | None
    bandwidth: float | None = None
    flops: float | None = None
    prompt: PromptFlops | None = None
    replicas: int = 1

    @property
    def devices(self) -> int:
        """How many all replicas take together."""
        return self.replicas * self.plan.requirements.tp_size

    @property
    def weight_bytes(self) -> int:
        return self.plan.requirements.weight_bytes

    @property
    def context_length(self) -> int:
        return self.plan.requirements.context_length or FAR

    def request_bytes(self, tokens: int) -> int | None:
        """What the chosen cache holds of one request; None where it does not say."""
        choice = self.plan["cache"]
        return choice.registered.size(
            "request_bytes", self.plan.requirements, choice.options, tokens
        )

    def step_bytes(self, tokens: int, requests: int = 1) -> int:
        """The peak of a step while that many requests of `tokens` tokens are read.

        Padded rows are read together; otherwise a step feeds `step_limit` tokens of all of them.
        Between two probed lengths, a straight line, which never says too little.
        """
        one = _on_line([(s.tokens, max(s.prefill, s.decode)) for s in self.steps], tokens)
        fed = min(tokens, self.step_limit or tokens)
        together = min(requests * tokens, self.step_limit or requests * tokens)
        return -(-one * together // fed)

    def decode_bytes(self, tokens: int, requests: int = 1) -> int:
        """The peak of a step that decodes that many requests of `tokens` tokens."""
        return requests * _on_line([(s.tokens, s.decode) for s in self.steps], tokens)

    def cache_bytes(self, tokens: int, requests: int = 1) -> int | None:
        """What the cache allocates for them, which can be more than they hold; None: unknown."""
        choice, needs = self.plan["cache"], self.plan.requirements
        return choice.registered.size("allocated_bytes", needs, choice.options, tokens, requests)

    def memory(self, weight_bytes: int | None = None) -> CacheMemory | None:
        """What fits beside the weights (of the plan, or as many bytes as given); None: unknown."""
        if self.request_bytes(1) is None or self.cache_bytes(1) is None:
            return None
        weights = self.weight_bytes if weight_bytes is None else weight_bytes
        left, held = max(0, self.device_memory - weights), self._held
        if self.pool is not None:  # which is there from the start
            return CacheMemory(self.pool, self.context_length, held)
        return CacheMemory(left, self.context_length, held, self._needed)

    def _held(self, tokens: int) -> int:
        held = self.request_bytes(tokens)
        assert held is not None
        return held

    def _needed(self, tokens: int, requests: int) -> int:
        return (self.cache_bytes(tokens, requests) or 0) + self.step_bytes(tokens, requests)

    def total(self, tokens: int, requests: int = 1, *, decoding: bool = False) -> int | None:
        """Weights, cache and the peak of a step together; None where the cache does not say.

        The step reads prompts, or only decodes.
        """
        cache = self.cache_bytes(tokens, requests)
        step = self.decode_bytes if decoding else self.step_bytes
        return None if cache is None else self.weight_bytes + cache + step(tokens, requests)

    @property
    def loading_bytes(self) -> int:
        """The peak while loading. On the CPU a file is mapped, and weights that change are copies.

        The kernel can drop a mapped file's pages where it needs them, so this is no hard demand.
        """
        changed = self.weight_bytes != self.checkpoint_bytes
        on_cpu = self.plan.requirements.device == "cpu"
        return self.weight_bytes + (self.checkpoint_bytes if changed and on_cpu else 0)

    def bytes_read(self, tokens: int, batch: int = 1) -> int | None:
        """What a step reads that decodes `batch` sequences of `tokens` tokens; None: unknown."""
        kept = _kv_read(self.plan.requirements, tokens)
        if self.reads is None or kept is None:
            return None
        return self.weight_bytes - self.reads.unread(batch) + batch * kept

    def decode_limit(self, tokens: int, batch: int = 1) -> float | None:
        """Tokens a second that memory bandwidth allows; None where it is not known."""
        read = self.bytes_read(tokens, batch)
        if self.bandwidth is None or not read:
            return None
        return batch * self.bandwidth / read

    def prompt_limit(self, tokens: int) -> float | None:
        """Seconds that reading a prompt takes at least; None where it is not known.

        A step that reads it must read the weights, too, however short the prompt is.
        """
        read = self.bytes_read(0)
        if self.flops is None or self.prompt is None or self.bandwidth is None or read is None:
            return None
        return max(self.prompt.of(tokens) / self.flops, read / self.bandwidth)

    def together(self) -> list[tuple[int, int | None, float | None, float | None]]:
        """What all replicas can do: (tokens, requests at once, tokens/s, prompts/s) by length.

        Tokens a second are those of as many requests as fit, while none reads its prompt, and
        prompts those while none decodes. None: unknown.
        """
        memory, rows = self.memory(), []
        for tokens in self.lengths:
            batch = memory.requests(tokens) if memory else None
            decode = self.decode_limit(tokens, batch) if batch else None
            prompt = self.prompt_limit(tokens)
            rows.append(
                (
                    tokens,
                    None if batch is None else batch * self.replicas,
                    None if decode is None else decode * self.replicas,
                    None if prompt is None else self.replicas / prompt,
                )
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        memory = self.memory()
        return {
            "architecture": self.plan.requirements.architecture,
            "chosen": {kind: choice.to_dict() for kind, choice in self.plan.choices.items()},
            "device_memory": {"bytes": self.device_memory, "given": self.given},
            "weights": {
                "bytes": self.weight_bytes,
                "known": self.weights_known,
                "while_loading": self.loading_bytes,
                "by_dtype": dict(self.dtypes),
                "by_quantizer": [_row(w, dtype=w.dtype, bytes=w.num_bytes) for w in self.weights],
            },
            "cache": {
                "pool_bytes": self.pool,
                "by_cache": [_row(c, request_bytes=dict(c.request_bytes)) for c in self.caches],
            },
            "lengths": [self._at(tokens, memory) for tokens in self.lengths],
            "longest_request": memory.longest if memory else None,
            "bandwidth": self.bandwidth,
            "flops": self.flops,
            "replicas": self.replicas,
            "devices": self.devices,
            "together": [
                {
                    "tokens": tokens,
                    "requests": held,
                    "tokens_per_second": decode,
                    "prompts_per_second": prompts,
                }
                for tokens, held, decode, prompts in self.together()
            ],
        }

    def _at(self, tokens: int, memory: CacheMemory | None) -> dict[str, Any]:
        step = next((s for s in self.steps if s.tokens == tokens), None)
        return {
            "tokens": tokens,
            "request_bytes": self.request_bytes(tokens),
            "prefill_tokens": step.fed if step else None,
            "prefill_bytes": step.prefill if step else None,
            "decode_bytes": step.decode if step else None,
            "total_bytes": self.total(tokens),
            "prompt_seconds": self.prompt_limit(tokens),
            "largest_batch": memory.requests(tokens) if memory else None,
            "decode": {
                batch: {
                    "bytes_read": self.bytes_read(tokens, batch),
                    "tokens_per_second": self.decode_limit(tokens, batch),
                }
                for batch in self.batch_sizes
            },
        }


def _row(row: WeightBytes | CacheBytes, **more: Any) -> dict[str, Any]:
    r = row.registered
    return {
        "name": r.name,
        "distribution": r.distribution,
        "version": r.version,
        "chosen": row.chosen,
        **more,
        "reasons": list(row.reasons),
    }


def _on_line(points: Sequence[tuple[int, int]], x: int) -> int:
    """The value at `x` on the line through the points around it; beyond them, the last ones'."""
    if not points:
        return 0
    if len(points) == 1:
        return points[0][1]
    at = min(max(1, bisect.bisect_left(points, (x, 0))), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(0, -(-(y0 * (x1 - x) + y1 * (x - x0)) // (x1 - x0)))


def _kv_read(needs: Requirements, tokens: int) -> int | None:
    """The keys and values that a token attends to, in bytes."""
    numbers = needs.packed_numbers if needs.layout == "packed" else needs.kv_numbers
    if not numbers:
        return None
    kept = sum(
        count * (tokens if window is None else min(tokens, window))
        for count, window in zip(numbers, needs.windows, strict=True)
    )
    return kept * BYTES[needs.dtype]
