"""A model's own heads at work: each step they guess what follows the tokens that it chose.

The heads read the model's last hidden states, which a hook takes out of every step. Of a text they
have read from somewhere on to the end: what was never computed here, since others had cached it, is
not there for them. That makes guesses worse, and never a text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.mtp import Heads, LastStates
from jackfield.contracts import PackedKVCache, ScheduledSequence, Sequence, StepBlock
from jackfield.engine.bound import BoundModel, vocab_size_of
from jackfield.engine.drawing import drafting_settings, drawn
from jackfield.engine.steps import RunningStep
from jackfield.errors import ExecutionError, error_text

if TYPE_CHECKING:
    from jackfield.contracts import ModelInputs

CHUNK = 512  # states that wait to be read, at most, and how many are read at once


@dataclass(slots=True)
class _Text:
    """A sequence as the heads have read it.

    `cache` has their keys and values of the positions before `read`, which stay. `states`,
    `[1, n, hidden]`, are the model's of those from `read` on; the last may be of drafts.
    """

    copy: Sequence
    cache: Any
    read: int
    states: torch.Tensor

    @property
    def end(self) -> int:
        """The position behind the last state."""
        return self.read + self.states.shape[1]


class HeadDrafts:
    """What `BindContext.assistant` is to a decoding with `heads`. Called in the loop's thread only.

    `made` are the heads that were read, of the model that is `bound`.
    """

    context_length: int | None = None  # they read nothing that the model does not

    def __init__(self, bound: BoundModel, made: Any) -> None:
        self._heads = Heads(made)
        self._states = LastStates(bound.model)
        self._packed = isinstance(bound.cache, PackedKVCache)
        self._decodings = {
            name
            for name, choice in bound.plan.decodings.items()
            if choice.backend.capabilities.heads
        }
        self._vocab_size = vocab_size_of(bound.model)
        self._who = type(bound.model).__name__
        self._block = StepBlock(self._heads.device)
        self._texts: dict[int, _Text] = {}
        self.install = self._states.install

    def take(self, step: RunningStep, inputs: ModelInputs) -> None:
        """Take the hidden states of a step that was just computed, and read long prompts."""
        states, begin = self._states.taken(), 0
        if inputs.row_of is not None:
            states = states.index_select(0, inputs.row_of)
        for row, item in enumerate(step.scheduled):
            count = item.num_tokens + len(item.drafts)
            own = states[:, begin : begin + count] if self._packed else states[row : row + 1]
            begin += count
            sequence = item.sequence
            if count and sequence.answer is sequence and self._is_ours(sequence):
                self._add(item, own[:, -count:].to(self._heads.device))

    def _is_ours(self, sequence: Sequence) -> bool:
        return sequence.settings.decoding in self._decodings

    def _add(self, item: ScheduledSequence, states: torch.Tensor) -> None:
        """Put `states` behind those before `item.start`; begin there if these are not known."""
        sequence, text = item.sequence, self._texts.get(item.sequence.id)
        if text is None or not text.read <= item.start <= text.end:
            copy = Sequence(
                sequence.id,
                (),
                drafting_settings(sequence.settings, self._vocab_size),
                sample=sequence.sample,
            )
            text = _Text(copy, self._heads.cache(), item.start, states[:, :0])
            self._texts[sequence.id] = text
        before = text.states[:, : item.start - text.read]
        text.states = torch.cat([before, states], 1)
        known = len(sequence.tokens) - self._heads.layers  # behind those stand all that heads read
        while min(text.end, known) - text.read >= CHUNK:
            self._read(text, sequence.tokens, CHUNK)

    def draft(
        self, sequences: Seq[Sequence], max_drafts: Seq[int], confidence_threshold: Seq[float]
    ) -> list[list[int]]:
        """A draft of each head for each sequence, at most `max_drafts[i]`, ending with one less
        likely than `confidence_threshold[i]`; none where the last step's states are not known.
        """
        found = []
        for one, room, least in zip(sequences, max_drafts, confidence_threshold, strict=True):
            text = self._texts.get(one.id)
            last = len(one.tokens) - 1  # was chosen, and never fed
            ready = text is not None and text.read < last <= text.end
            drafts = self._drafts(text, one, last - text.read) if text and ready else []
            sure = next((i for i, (_, p) in enumerate(drafts) if not p >= least), room)
            found.append([token for token, _ in drafts[: min(room, sure + 1)]])
        return found

    def _drafts(self, text: _Text, sequence: Sequence, count: int) -> list[tuple[int, float]]:
        """One draft of each head, with its probability, by the `count` states before the end."""
        text.copy.tokens, text.copy.prompt_length = sequence.tokens, sequence.prompt_length
        drafts: list[tuple[int, float]] = []
        states, first = text.states[:, :count], text.read + 1
        ids = sequence.tokens[first:]
        with self._guarded():
            for head in range(self._heads.layers):
                states = self._heads.read(head, states, ids, first + head, text.cache)
                before = [token for token, _ in drafts]
                logits = self._heads.logits(states)
                drafts += drawn([text.copy], [before], logits, self._block)
                ids = [*ids[1:], drafts[-1][0]]
            # What later heads have read of drafts may be wrong, and is read again.
            again = min(count, self._heads.layers - 1)
            text.cache.crop(-again)
        self._keep(text, count - again, count)
        return drafts

    def _read(self, text: _Text, tokens: list[int], count: int) -> None:
        """Read `count` states behind whose last there are tokens for every head."""
        states, first = text.states[:, :count], text.read + 1
        with self._guarded():
            for head in range(self._heads.layers):
                at = first + head
                states = self._heads.read(head, states, tokens[at : at + count], at, text.cache)
            text.cache.crop(0)
        self._keep(text, count, text.states.shape[1])

    def _keep(self, text: _Text, read: int, end: int) -> None:
        """`read` of the states were read; those up to `end` stay. No step's tensor is held."""
        text.states = text.states[:, read:end].clone()
        text.read += read

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ExecutionError(
                f"a draft by the heads of {self._who} raised {error_text(error)}; mend it, or "
                "choose another decoding"
            ) from error

    def release(self, sequences: Seq[Sequence]) -> None:
        """Forget what was read of these sequences; unknown ones are ignored."""
        for sequence in sequences:
            self._texts.pop(sequence.id, None)
