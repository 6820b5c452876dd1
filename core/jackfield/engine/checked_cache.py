"""Checks of a cache of another package: an error that names it, instead of a wrong text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import le
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import CacheUsage, FixedStep, KVCache, ModelInputs
from jackfield.engine.checked import unchanged
from jackfield.engine.checked_inputs import flaw_of_tokens
from jackfield.engine.checked_pages import Spots
from jackfield.engine.guarded_cache import GuardedCache
from jackfield.errors import quoted
from jackfield.guarded import fault

if TYPE_CHECKING:
    from jackfield.contracts import Sequence, Step


class CheckedCache(GuardedCache):
    """`inner`, the cache of the backend `who`. The checks take a few microseconds a step."""

    _packed = False

    def __init__(self, inner: KVCache, who: object) -> None:
        super().__init__(inner, who)
        self._spots, self._spot = Spots(), False
        self._reaches = 0  # how many tokens the longest row has, with those of the step

    def admit(self, sequence: Sequence) -> bool:
        with self._guards["admit"], self._unchanged("admit", (sequence,)):
            found = self.inner.admit(sequence)
        if type(found) is not bool:
            raise fault(self, f"admit must return True or False, got {quoted(found)}")
        most = len(sequence.tokens) - 1 if self.continuous else 0
        if found and not self._counts(sequence, 0, most):
            raise self._lost("admit", sequence, f"0 to {most}")
        return found

    def _unchanged(self, what: str, sequences: Seq[Sequence]) -> unchanged:
        return unchanged(self, what, sequences, but_cached=True)

    def _counts(self, sequence: Sequence, least: int, most: int) -> bool:
        return type(sequence.num_cached) is int and least <= sequence.num_cached <= most

    def _lost(self, what: str, sequence: Sequence, due: object) -> Exception:
        return fault(
            self,
            f"{what} must leave num_cached of request {sequence.id} at {due}, got "
            f"{quoted(sequence.num_cached)}",
        )

    def adjust_schedule(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        left = list(wanted)
        if not self.continuous:
            most = max(wanted)
            left = [min(most, len(s.tokens) - s.num_cached) for s in sequences]
        with self._guards["adjust_schedule"]:
            found = self.inner.adjust_schedule(tuple(sequences), list(wanted))
            least = [int(self._packed and most > 0) for most in left]
            right = (
                len(found) == len(left)
                and set(map(type, found)) == {int}
                and all(map(le, least, found))
                and all(map(le, found, left))
                and any(found)
            )
        if not right:
            few = "each at least 1 where one is wanted" if self._packed else "not all 0"
            raise fault(
                self,
                f"adjust_schedule must return whole numbers, {few}, at most {quoted(left)}, got "
                f"{quoted(found)}",
            )
        return found

    def fits(self, step: Step) -> bool:
        with self._guards["fits"]:
            found = self.inner.fits(step)
        if type(found) is not bool:
            raise fault(self, f"fits must return True or False, got {quoted(found)}")
        return found

    def prepare(self, step: Step) -> ModelInputs:
        with self._guards["prepare"]:
            found: Any = self.inner.prepare(step)
            if not isinstance(found, ModelInputs):
                raise fault(self, f"prepare must return ModelInputs, got {quoted(found)}")
            flaw = _flaw(found, step, self.continuous)
            self._spot = self._spots.next(step.scheduled)
            # Reading tensors of another device waits for it.
            read = self._spot or found.kwargs["input_ids"].device.type == "cpu"
            if not flaw and read:
                flaw = flaw_of_tokens(found, step, packed=self._packed)
        if flaw:
            raise fault(self, f"prepare must return inputs for the step, got {flaw}")
        past = found.kwargs.get("past_key_values")
        if past is not None:
            self._reaches = max(f.start + f.num_tokens + len(f.drafts) for f in step.scheduled)
            if "update" not in vars(past):
                self._watch(past)
        return found

    def _look_at_update(self, layer: Any, key: Any, found: Any) -> None:
        """Hold what the model gets to what every attention relies on."""
        keys, values = found
        least = key.shape[2] if getattr(layer, "is_sliding", False) else self._reaches
        right = (
            keys.shape[:2] == key.shape[:2]
            and keys.shape[2] == values.shape[2] >= least
            and keys.dtype == key.dtype
            and keys.device == key.device
        )
        if not right:
            raise fault(
                self,
                f"update must return the keys and values of {least} tokens or more, of "
                f"{list(key.shape[:2])} rows and heads in {key.dtype}, got {list(keys.shape)} "
                f"and {list(values.shape)} in {keys.dtype}",
            )

    def commit(self, step: Step, kept: Seq[int]) -> None:
        fed = [item.sequence for item in step.scheduled]
        with self._guards["commit"], self._unchanged("commit", fed):
            self.inner.commit(step, tuple(kept))
        for item, count in zip(step.scheduled, kept, strict=True):
            if item.sequence.num_cached != item.start + count:
                raise self._lost("commit", item.sequence, item.start + count)

    def release(self, sequences: Seq[Sequence]) -> None:
        sequences = tuple(sequences)
        for sequence in sequences:
            self._spots.left(sequence.id)
        with self._guards["release"], self._unchanged("release", sequences):
            self.inner.release(sequences)

    def preempt(self, sequence: Sequence) -> None:
        with self._guards["preempt"]:
            self.inner.preempt(sequence)
        if sequence.num_cached != 0:
            raise self._lost("preempt", sequence, 0)

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        with self._guards["truncate"]:
            self.inner.truncate(sequence, tokens)
        if sequence.num_cached not in (0, tokens):
            raise self._lost("truncate", sequence, f"{tokens}, or 0")

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        due = [source.num_cached for source, _ in copies]
        with self._guards["fork"]:
            self.inner.fork(tuple(copies), tuple(dropped))
        for (_, into), count in zip(copies, due, strict=True):
            if into.num_cached != count:
                raise self._lost("fork", into, count)

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        # Many have been written without `copies`, which only one that forks is ever told.
        arguments = (prompt_length, max_new_tokens) + ((copies,) if copies != 1 else ())
        with self._guards["refuse"]:
            found = self.inner.refuse(*arguments)
        if type(found) not in (str, type(None)):
            raise fault(self, f"refuse must return a reason or None, got {quoted(found)}")
        return found

    def fix(self, rows: int) -> FixedStep:
        with self._guards["fix"]:
            found = self.inner.fix(rows)
        flaw = ""
        if not isinstance(found, FixedStep):
            flaw = quoted(found)
        else:
            for name in ("input_ids", "position_ids"):
                tensor: Any = getattr(found, name)
                if not isinstance(tensor, torch.Tensor) or tensor.shape != (1, rows):
                    flaw = f"{name}={quoted(tensor)}"
        if flaw:
            raise fault(self, f"fix must return a FixedStep of {rows} rows, got {flaw}")
        return found

    def loosen(self, rows: int) -> None:
        with self._guards["loosen"]:
            self.inner.loosen(rows)

    def held_bytes(self) -> int | None:
        with self._guards["held_bytes"]:
            found = self.inner.held_bytes()
        if found is not None and (type(found) is not int or found < 0):
            raise fault(self, f"held_bytes must return bytes or None, got {quoted(found)}")
        return found

    def usage(self) -> CacheUsage | None:
        with self._guards["usage"]:
            found = self.inner.usage()
        if not isinstance(found, CacheUsage | None):
            raise fault(self, f"usage must return a CacheUsage or None, got {quoted(found)}")
        return found


def _flaw(inputs: ModelInputs, step: Step, continuous: bool) -> str:
    """What is wrong with the inputs of a step, in words; empty: nothing."""
    ids = inputs.kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.long:
        return f"input_ids={quoted(ids)}"
    tokens = [item.num_tokens + len(item.drafts) for item in step.scheduled]
    if ids.numel() < sum(tokens) or (
        continuous and ids.numel() != sum(tokens) and ids.shape[0] == 1
    ):
        return f"input_ids {list(ids.shape)} for {sum(tokens)} tokens"
    positions = inputs.kwargs.get("position_ids")
    if positions is not None and tuple(positions.shape[-2:]) != tuple(ids.shape):
        return f"position_ids {list(positions.shape)} for input_ids {list(ids.shape)}"
    if inputs.decode is not step.decode:
        return f"decode={inputs.decode!r}"
    named = inputs.rows if inputs.row_of is None else len(inputs.row_of)
    if named != len(step.scheduled) or type(inputs.rows) is not int:
        return f"{named} rows for {len(step.scheduled)} scheduled sequences"
    return ""
