"""The step after this one, begun before anybody has read what this one chose.

A device that waits until the host has read its tokens, and told it the next step, stands still for
that long in every step. Where nothing of the next step hangs on them but the ids that are fed,
these are copied on the device, and the host reads while it computes. A text that has ended by then
has taken part in one step more, which nobody sees. After vLLM's asynchronous scheduling
(https://docs.vllm.ai/en/latest/usage/v1_guide.html).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jackfield.contracts import ModelInputs
from jackfield.engine.decoder import StepChoice
from jackfield.engine.sequences import RunningSequence
from jackfield.engine.steps import RunningStep

#: In the place of a token that is not known yet; any id will do.
_UNREAD = 0


@dataclass(frozen=True)
class Begun:
    """A step that was told to the device; `waited`: it has ended when its `choice` is read."""

    step: RunningStep
    choice: StepChoice
    waited: bool

    @property
    def goes_on(self) -> list[RunningSequence]:
        """Who needs another step, unless what is chosen in this one ends its text."""
        return [
            item.sequence
            for item in self.step.scheduled
            if not item.ended and item.sequence.num_new + 1 < item.sequence.settings.max_new_tokens
        ]

    @property
    def kept(self) -> list[int]:
        """What stays of it in the cache; it has no drafts."""
        return [item.num_tokens for item in self.step.scheduled]


@contextlib.contextmanager
def unread(sequences: Seq[RunningSequence]) -> Iterator[None]:
    """Let these have one more token meanwhile, which nobody knows yet."""
    for sequence in sequences:
        list.append(sequence.tokens, _UNREAD)
    try:
        yield
    finally:
        for sequence in sequences:
            list.pop(sequence.tokens)


def feed(inputs: ModelInputs, step: RunningStep, before: Begun) -> None:
    """Have `inputs` of `step` feed what was chosen in the step before, each sequence its token."""
    assert before.choice.chosen is not None
    chose = [before.step.scheduled[at].sequence.id for at in before.choice.own]
    rows = {number: row for row, number in enumerate(chose)}
    tokens = before.choice.chosen.of([rows[item.sequence.id] for item in step.scheduled])
    inputs.kwargs["input_ids"].copy_(tokens[None])
