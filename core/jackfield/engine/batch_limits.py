"""How much the loop does at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jackfield.engine.token_budget import LEAST, TARGET_STEP_SECONDS
from jackfield.errors import UsageError
from jackfield.planning.memory import STEP_TOKENS
from jackfield.planning.planning import Plan
from jackfield.planning.spec import LoadSpec

UNLIMITED = 1 << 62
WHOLE_CHUNK = 64  # tokens of a prompt that a deterministic step feeds, where nothing else is asked


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """How much the loop does at once. All are at least 1; None: no bound.

    `max_batch_size` sequences run together, a step computes `max_batch_tokens` (drafts come on
    top) and `prefill_chunk_size` tokens of one prompt. With `whole_chunks` a sequence is always
    fed in the same pieces, whatever runs beside it. While somebody reads along, a step feeds no
    more tokens of prompts than `target_step_seconds` have room for.
    """

    max_batch_size: int
    max_batch_tokens: int | None = None
    prefill_chunk_size: int | None = None
    target_step_seconds: float | None = None
    whole_chunks: bool = False

    @property
    def max_chunk_size(self) -> int | None:
        """How many tokens of one sequence a step feeds at most."""
        bounds = [b for b in (self.max_batch_tokens, self.prefill_chunk_size) if b is not None]
        return min(bounds, default=None)

    @property
    def pace(self) -> tuple[float, int, int] | None:
        """Seconds and tokens of a step at most, and what prompts get in any case; None: no target.

        A chunk whose size was named is fed whole; those of several prompts share a step.
        """
        if self.target_step_seconds is None or self.max_batch_tokens is None:
            return None
        return self.target_step_seconds, self.max_batch_tokens, self.prefill_chunk_size or LEAST

    def cuts(self, tokens: int) -> str | None:
        """Why no step feeds so many tokens of one sequence, and what does; None: some do."""
        size, most = self.prefill_chunk_size, self.max_batch_tokens
        if size is not None and size < tokens:
            return f"prefill_chunk_size is {size}; load the model with {tokens} or more"
        if most is not None and most < tokens:
            return f"max_batch_tokens is {most}; load the model with {tokens} or more"
        return None


def check_sizes(**sizes: int | None) -> None:
    """Raise UsageError unless every size is None or a whole number, at least 1."""
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise UsageError(f"{name} must be a whole number, at least 1, not {size!r}")


def check_seconds(**times: object) -> None:
    """Raise UsageError unless every time is a number, more than 0."""
    for name, time in times.items():
        if isinstance(time, bool) or not isinstance(time, int | float) or not time > 0:
            raise UsageError(f"{name} must be a number of seconds, more than 0, not {time!r}")


def check_limits(spec: LoadSpec) -> None:
    """Raise UsageError for what is no size, whatever the model."""
    check_sizes(
        max_batch_size=spec.max_batch_size,
        max_batch_tokens=spec.max_batch_tokens,
        prefill_chunk_size=spec.prefill_chunk_size,
        max_waiting=spec.max_waiting,
        max_adapters=spec.max_adapters,
    )
    check_seconds(stall_after=spec.stall_after)
    if spec.target_step_seconds is not None:
        check_seconds(target_step_seconds=spec.target_step_seconds)


def limits_for(plan: Plan, spec: LoadSpec) -> BatchLimits:
    """The bounds of an engine with this plan. Raises UsageError where they contradict each other.

    A step must have room for a token of every sequence and, in the end, for a prompt beside them.
    """
    needs = plan.requirements
    max_batch_size, max_batch_tokens = spec.max_batch_size, spec.max_batch_tokens
    prefill_chunk_size, whole = spec.prefill_chunk_size, needs.batch_invariant
    if prefill_chunk_size is not None and needs.whole_prompt:
        raise UsageError(
            f"prefill_chunk_size={prefill_chunk_size}: {needs.architecture} reads a prompt in one "
            f"piece ({needs.whole_prompt}); drop prefill_chunk_size"
        )
    if whole and prefill_chunk_size is None:
        prefill_chunk_size = WHOLE_CHUNK
    target = _target(plan, spec)
    least = max_batch_size + (prefill_chunk_size or 1 if whole else 0)
    if needs.layout == "packed":
        if max_batch_tokens is None:
            max_batch_tokens = max(STEP_TOKENS, least)
        if max_batch_tokens < least:
            raise UsageError(
                f"max_batch_tokens={max_batch_tokens} is too few for max_batch_size="
                f"{max_batch_size}, which needs {least}; raise the one or lower the other"
            )
    elif max_batch_tokens is not None:
        raise UsageError(
            f"max_batch_tokens={max_batch_tokens} bounds steps of the packed layout, and the cache "
            f"{plan['cache'].registered.name!r} pads; select cache 'paged', or drop it"
        )
    return BatchLimits(
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        prefill_chunk_size=prefill_chunk_size,
        target_step_seconds=target,
        whole_chunks=whole,
    )


def _target(plan: Plan, spec: LoadSpec) -> float | None:
    """How long a step should take; None: as long as it takes. Raises UsageError."""
    needs, asked = plan.requirements, spec.target_step_seconds
    if needs.layout != "packed":
        cache = plan["cache"].registered.name
        why = f"the cache {cache!r} pads and reads whole prompts; select cache 'paged'"
    elif needs.batch_invariant:
        why = "with deterministic=True prompts are always fed in the same pieces; drop it"
    else:
        default = TARGET_STEP_SECONDS if spec.max_batch_tokens is None else math.inf
        target = default if asked is None else asked
        return None if target == math.inf else target
    if asked is not None:
        raise UsageError(f"target_step_seconds={asked:g}: {why}, or drop target_step_seconds")
    return None
