"""The loop: one request or a thousand, plain or speculative, padded or packed.

Reads from top to bottom; its parts stand in the order in which a step calls them. Everything it
calls was bound once: no plugin machinery in here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from jackfield.contracts import Accepted, KVCache, ModelInputs, Strategy
from jackfield.sequences import Feed, Sequence, Step


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did to one sequence: the tokens it took, the text it may show."""

    sequence: Sequence
    tokens: list[int]
    text: str


class Loop:
    """Runs sequences to their end, `max_batch_size` at a time. Not thread-safe: one caller steps.

    `prefill_chunk_size` is how many tokens of a prompt one step feeds at most; None: all of them.
    `steps` counts the forward calls.
    """

    def __init__(
        self,
        forward: Callable[[ModelInputs], torch.Tensor],
        cache: KVCache,
        decoding: Strategy,
        max_batch_size: int,
        prefill_chunk_size: int | None = None,
    ) -> None:
        self.forward = forward
        self.cache = cache
        self.decoding = decoding
        self.max_batch_size = max_batch_size
        self.prefill_chunk_size = cache.prefill_chunk_size = prefill_chunk_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.steps = 0

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence wherever it is; nothing is computed for it from now on."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = "cancelled"
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._retire([sequence])

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Make every running sequence one step longer. Requires work: `waiting` or `running`."""
        self._admit()
        drafts = self.decoding.propose(self.running)
        step = self._schedule(drafts)
        inputs = self.cache.prepare(step)
        logits = self.forward(inputs)
        self.steps += 1
        accepted = self.decoding.accept(step, logits)
        self.cache.commit(step, [_kept(f, a) for f, a in zip(step.feeds, accepted, strict=True)])
        return self._emit(step, accepted)

    def _admit(self) -> None:
        room = self.cache.room(self.waiting)
        free = self.max_batch_size - len(self.running)
        for _ in range(min(len(self.waiting), free if room is None else min(free, room))):
            self.running.append(self.waiting.popleft())

    def _schedule(self, drafts: list[list[int]]) -> Step:
        """Every running sequence feeds what is not cached yet: its prompt, then a token a step."""
        portions = self.cache.portions(self.running, self.prefill_chunk_size)
        feeds = []
        for sequence, count, draft in zip(self.running, portions, drafts, strict=True):
            feed = Feed(sequence, sequence.num_cached, count, draft)
            feeds.append(feed if feed.samples or not draft else replace(feed, drafts=()))
        return Step(feeds)

    def _emit(self, step: Step, accepted: Seq[Accepted]) -> list[Event]:
        events, finished = [], []
        for feed, gain in zip(step.feeds, accepted, strict=True):
            sequence = feed.sequence
            if not (gain.tokens or gain.error):
                continue  # a part of its prompt
            if gain.error is not None:
                sequence.error, sequence.finish_reason = gain.error, "error"
            events.append(Event(sequence, *sequence.extend(gain.tokens, gain.logprobs)))
            if sequence.finish_reason is not None:
                finished.append(sequence)
        self._retire(finished)
        return events

    def _retire(self, finished: Seq[Sequence]) -> None:
        if finished:
            self.running = [s for s in self.running if s.finish_reason is None]
            self.cache.release(finished)
            self.decoding.release(finished)

    def reset(self) -> None:
        """Give everything back after a failure; what was running or waiting is lost."""
        lost = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self.cache.release(lost)
        self.decoding.release(lost)


def _kept(feed: Feed, gain: Accepted) -> int:
    """Of what was fed: all of the sequence's own tokens, and the drafts that were accepted."""
    return feed.count + max(0, min(len(feed.drafts), len(gain.tokens) - 1))
