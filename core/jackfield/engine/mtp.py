"""A model's own heads at work: each step they guess what follows the tokens that it chose.

The heads read the model's last hidden states, which a hook takes out of every step. Of a text they
have read from somewhere on to the end: what was never computed here, since others had cached it, is
not there for them. That makes guesses worse, and never a text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.heads import Heads
from jackfield.bridge.model_layers import vocab_size_of
from jackfield.bridge.mtp import LastStates
from jackfield.contracts import PackedKVCache, ScheduledSequence, Sequence, StepBlock
from jackfield.engine.bound import BoundModel
from jackfield.engine.drawing import drafting_settings, drawn
from jackfield.engine.steps import RunningStep
from jackfield.errors import ExecutionError, error_text
from jackfield.guarded import all_of

if TYPE_CHECKING:
    from jackfield.contracts import ModelInputs

CHUNK = 512  # states that wait to be read, at most, and how many are read at once
TOGETHER = 8192  # tokens of all texts that are read in one call, at most, unless one has more


@dataclass(slots=True, eq=False)
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

    def install(self) -> Callable[[], None]:
        """Look at the model's calls from now on. Returns what ends that, and forgets all."""
        return partial(all_of, [self._states.install(), self._heads.install(), self._texts.clear])

    def begin(self) -> None:
        """The next call of this thread is a step's."""
        self._states.begin()

    def take(self, step: RunningStep, inputs: ModelInputs) -> None:
        """Take the hidden states of a step that was just computed, and read long prompts."""
        states, begin = self._states.taken(), 0
        packed = self._packed and inputs.row_of is None
        if inputs.row_of is not None:
            states = states.index_select(0, inputs.row_of)
        for row, item in enumerate(step.scheduled):
            count = item.num_tokens + len(item.drafts)
            own = states[:, begin : begin + count] if packed else states[row : row + 1]
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
        found: dict[int, list[tuple[int, float]]] = {}
        for group in self._groups(filter(None, map(self._ready, sequences))):
            found |= self._drafts(group)
        drafts = []
        for one, room, least in zip(sequences, max_drafts, confidence_threshold, strict=True):
            own = found.get(one.id, [])
            sure = next((i for i, (_, p) in enumerate(own) if not p >= least), room)
            drafts.append([token for token, _ in own[: min(room, sure + 1)]])
        return drafts

    def _ready(self, sequence: Sequence) -> _Text | None:
        """Its text, up to the last token, if the states before this one are known."""
        text, last = self._texts.get(sequence.id), len(sequence.tokens) - 1
        if text is None or not text.read < last <= text.end:
            return None
        text.copy.tokens, text.copy.prompt_length = sequence.tokens, sequence.prompt_length
        text.states = text.states[:, : last - text.read]
        return text

    def _groups(self, texts: Iterable[_Text]) -> Iterator[list[_Text]]:
        """Those that are read in one call: their keys and values are laid side by side for it."""
        group: list[_Text] = []
        for text in texts:
            if group and sum(one.end for one in (*group, text)) > TOGETHER:
                yield group
                group = []
            group.append(text)
        if group:
            yield group

    def _drafts(self, texts: list[_Text]) -> dict[int, list[tuple[int, float]]]:
        """One draft of each head, with its probability, for each of `texts`, by its `id`."""
        states = torch.cat([text.states for text in texts], 1)
        lasts = list(accumulate(text.states.shape[1] for text in texts))
        at = torch.tensor(lasts, device=states.device) - 1
        ids = [text.copy.tokens[text.read + 1 :] for text in texts]
        copies = [text.copy for text in texts]
        found: list[list[tuple[int, float]]] = [[] for _ in texts]
        with self._guarded():
            for head in range(self._heads.layers):
                states = self._layer(head, states, ids, texts)
                logits = self._heads.logits(states[0].index_select(0, at))
                drafts = [[token for token, _ in own] for own in found]
                chosen = drawn(copies, drafts, logits, self._block)
                for i, (token, probability) in enumerate(chosen):
                    ids[i] = [*ids[i][1:], token]
                    found[i].append((token, probability))
            for text in texts:
                # What later heads have read of drafts may be wrong, and is read again.
                count = text.states.shape[1]
                again = min(count, self._heads.layers - 1)
                text.cache.crop(-again)
                self._keep(text, count - again)
        return {text.copy.id: own for text, own in zip(texts, found, strict=True)}

    def _read(self, text: _Text, tokens: list[int], count: int) -> None:
        """Read `count` states behind whose last there are tokens for every head."""
        states, first = text.states[:, :count], text.read + 1
        with self._guarded():
            for head in range(self._heads.layers):
                ids = tokens[first + head : first + head + count]
                states = self._layer(head, states, [ids], [text])
            text.cache.crop(0)
        self._keep(text, count)

    def _layer(
        self, head: int, states: torch.Tensor, ids: list[list[int]], texts: list[_Text]
    ) -> torch.Tensor:
        firsts = [text.read + 1 + head for text in texts]
        return self._heads.read(head, states, ids, firsts, [text.cache for text in texts])

    def _keep(self, text: _Text, read: int) -> None:
        """`read` of the states were read, the others stay. No step's tensor is held."""
        text.states = text.states[:, read:].clone()
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
