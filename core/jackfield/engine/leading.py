"""Rank 0 of a model that several processes share: its loop's calls of the cache go to all ranks.

The loop, the scheduler, the sampler and all texts are in rank 0 alone. The others need to know what
changes their part of the cache, and what is fed: the calls of `KVCache` themselves, in their order,
with sequences by number and tokens that are new. They are sent in one message a step, before rank 0
begins its own forward call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from jackfield.contracts import (
    CacheUsage,
    FixedStep,
    KVCache,
    ModelInputs,
    ScheduledSequence,
    Sequence,
    Settings,
    Step,
)
from jackfield.errors import ExecutionError, RanksError

if TYPE_CHECKING:
    import torch

    from jackfield.bridge.lora import HeldLora
    from jackfield.parallel.ranks import Leader

#: Types of settings that the other ranks are told; functions and structures are for the sampler.
_PLAIN = (bool, int, float, str, type(None))


class SharedCache(KVCache):
    """The cache of rank 0, `inner`; the other ranks do to theirs what is done to it."""

    def __init__(self, inner: KVCache, leader: Leader) -> None:
        self._inner, self._leader = inner, leader
        self._acts: list[Any] = []
        self._known: dict[int, int] = {}  # sequences that the others have -> how many tokens of it
        self.continuous = inner.continuous  # type: ignore[misc]

    def __str__(self) -> str:
        return str(self._inner)

    def send(self) -> None:
        """Tell the others what was done since the last time. Raises RanksError."""
        acts, self._acts = self._acts, []
        if acts:
            self._leader.send(acts)

    def _tell(self, *sequences: Sequence) -> None:
        """See that the others have these sequences, with all their tokens."""
        for sequence in sequences:
            known = self._known.get(sequence.id)
            if known is None:
                self._acts.append(["new", _described(sequence)])
            elif len(sequence.tokens) > known:
                self._acts.append(["tokens", sequence.id, sequence.tokens[known:]])
            self._known[sequence.id] = len(sequence.tokens)

    def admit(self, sequence: Sequence) -> bool:
        if not self._inner.admit(sequence):
            return False
        self._tell(sequence)
        act = ["admit", sequence.id, sequence.num_cached, sequence.preemptions, sequence.arrival]
        self._acts.append(act)
        return True

    def prepare(self, step: Step) -> ModelInputs:
        inputs = self._inner.prepare(step)
        self._tell(*(item.sequence for item in step.scheduled))
        self._acts.append(["step", list(map(_fed, step.scheduled))])
        return inputs

    def commit(self, step: Step, kept: Seq[int]) -> None:
        self._inner.commit(step, kept)
        self._acts.append(["commit", list(kept)])

    def release(self, sequences: Seq[Sequence]) -> None:
        # after a failure a group comes once for each of its beams
        known = [n for n in dict.fromkeys(one.id for one in sequences) if n in self._known]
        self._inner.release(sequences)
        for number in known:
            del self._known[number]
        if known:
            self._acts.append(["release", known])
        if not self._known and self._leader.cause is None:
            self.send()  # nobody knows when the next step comes

    def preempt(self, sequence: Sequence) -> None:
        self._tell(sequence)
        self._inner.preempt(sequence)
        self._acts.append(["preempt", sequence.id])

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        for source, into in copies:
            known = self._known[source.id]
            self._acts.append(["become", into.id, source.id, into.sample, into.tokens[known:]])
            self._known[into.id] = len(into.tokens)
        self._tell(*dropped, *(source for source, _ in copies))
        pairs = [[source.id, into.id] for source, into in copies]
        self._inner.fork(copies, dropped)
        self._acts.append(["fork", pairs, [sequence.id for sequence in dropped]])

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        raise ExecutionError("a draft model's cache is not shared by processes; please report it")

    def forget(self) -> None:
        self._inner.forget()
        self._acts.append(["forget"])

    def adjust_schedule(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        return self._inner.adjust_schedule(sequences, wanted)

    def fits(self, step: Step) -> bool:
        return self._inner.fits(step)

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        return self._inner.refuse(prompt_length, max_new_tokens, copies)

    def held_bytes(self) -> int | None:
        return self._inner.held_bytes()

    def usage(self) -> CacheUsage | None:
        return self._inner.usage()

    def fix(self, rows: int) -> FixedStep:
        raise ExecutionError("steps that are shared by processes lie at no fixed places")

    def close(self) -> None:
        self._inner.close()


def shared_forward(
    forward: Callable[[ModelInputs], torch.Tensor], cache: SharedCache, leader: Leader
) -> Callable[[ModelInputs], torch.Tensor]:
    """`forward` of rank 0, which all ranks compute together.

    Raises RanksError where one is gone, or where this one fails: the others are then in another
    step, and there is no way back.
    """

    def together(inputs: ModelInputs) -> torch.Tensor:
        cache.send()
        begin = time.monotonic()
        try:
            return forward(inputs)
        except RanksError:
            raise
        except BaseException as error:
            failure = leader.blame(error, time.monotonic() - begin)
            failure.plugin = getattr(error, "plugin", None)
            raise failure from error

    return together


def _fed(item: ScheduledSequence) -> list[Any]:
    return [item.sequence.id, item.start, item.num_tokens, list(item.drafts)]


def _described(sequence: Sequence) -> dict[str, Any]:
    """What another rank makes the same sequence of."""
    adapter: HeldLora | None = getattr(sequence, "adapter", None)
    return {
        "id": sequence.id,
        "tokens": list(sequence.tokens),
        "prompt_length": sequence.prompt_length,
        "sample": sequence.sample,
        "beside": sequence.members[0].id,
        "adapter": None if adapter is None else adapter.number,
        "settings": plain_settings(sequence.settings),
    }


def plain_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are numbers, texts, or several of these."""
    return {
        name: value
        for name, value in settings._asdict().items()
        if isinstance(value, _PLAIN)
        or (type(value) is tuple and all(isinstance(one, _PLAIN) for one in value))
    }
