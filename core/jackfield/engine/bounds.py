"""How much the loop does at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jackfield.errors import UsageError
from jackfield.planning.memory import STEP_TOKENS as PACKED_TOKENS
from jackfield.planning.memory import step_bytes
from jackfield.planning.planning import Plan
from jackfield.planning.spec import LoadSpec

UNLIMITED = 1 << 62
WHOLE_CHUNK = 64  # tokens of a prompt that a deterministic step feeds, where nothing else is asked


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much the loop does at once. All are at least 1; None: no bound.

    `max_batch_size` sequences run together, a step computes `max_batch_tokens` (drafts come on
    top) and `prefill_chunk_size` tokens of one prompt. With `whole_chunks` a sequence is always
    fed in the same pieces, whatever runs beside it.
    """

    max_batch_size: int
    max_batch_tokens: int | None = None
    prefill_chunk_size: int | None = None
    whole_chunks: bool = False

    @property
    def max_portion(self) -> int | None:
        """How many tokens of one sequence a step feeds at most."""
        bounds = [b for b in (self.max_batch_tokens, self.prefill_chunk_size) if b is not None]
        return min(bounds, default=None)


def shared(plan: Plan, bounds: Bounds, beside: Any = None) -> tuple[int, float]:
    """The bytes that steps of `plan` take, and the share of the rest that its cache may have.

    `beside` has the plan of a draft model. Where that is on the same device, its steps are counted
    too, and keys and values are shared so that both models hold as many tokens.
    """
    tokens, rows = bounds.max_batch_tokens or PACKED_TOKENS, bounds.max_batch_size
    own = step_bytes(plan.requirements, tokens, rows)
    if beside is None or _device(beside.plan) != _device(plan):
        return own, 1.0
    mine, other = _token_bytes(plan), _token_bytes(beside.plan)
    return own + step_bytes(beside.plan.requirements, tokens, rows), mine / (mine + other)


def _device(plan: Plan) -> str | None:
    return plan.placement.device if plan.placement else plan.requirements.device


def _token_bytes(plan: Plan) -> int:
    """What a token's keys and values take; 1 where nobody can tell."""
    needs, cache = plan.requirements, plan["cache"]
    return max(1, (cache.registered.size("request_bytes", needs, cache.options, 1024) or 0) // 1024)


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


def check_bounds(spec: LoadSpec) -> None:
    """Raise UsageError for what is no size, whatever the model."""
    check_sizes(
        max_batch_size=spec.max_batch_size,
        max_batch_tokens=spec.max_batch_tokens,
        prefill_chunk_size=spec.prefill_chunk_size,
        max_waiting=spec.max_waiting,
    )
    check_seconds(stall_after=spec.stall_after)


def bounds_for(plan: Plan, spec: LoadSpec) -> Bounds:
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
    least = max_batch_size + (prefill_chunk_size or 1 if whole else 0)
    if needs.layout == "packed":
        if max_batch_tokens is None:
            max_batch_tokens = max(PACKED_TOKENS, least)
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
    return Bounds(
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        prefill_chunk_size=prefill_chunk_size,
        whole_chunks=whole,
    )
