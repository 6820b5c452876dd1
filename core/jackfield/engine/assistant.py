"""A draft model at work: it continues copies of sequences, in batches, from a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jackfield.bridge.model_layers import vocab_size_of
from jackfield.bridge.tokenizer import Text
from jackfield.contracts import ScheduledSequence, Sequence, Settings, Step, StepBlock
from jackfield.engine.bound import BoundModel
from jackfield.engine.drawing import ENDLESS, drafting_settings, drawn
from jackfield.engine.reading import Assistance
from jackfield.engine.report import Observation, observe
from jackfield.engine.token_translation import TokenTranslator, translator
from jackfield.errors import ExecutionError, JackfieldError, error_text

if TYPE_CHECKING:
    import torch

CHUNK = 512  # tokens of a prompt that a step of the draft model reads


@dataclass(slots=True)
class _Guess:
    """One sequence's drafts as they grow: at most `room` of them.

    None after one that is less likely than `confidence_threshold`.
    """

    target: Sequence
    copy: Sequence
    room: int
    confidence_threshold: float
    drafts: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return len(self.drafts) < self.room


class DraftModel:
    """What `BindContext.assistant` is. Called in the loop's thread only."""

    def __init__(self, bound: BoundModel, translator: TokenTranslator) -> None:
        self.bound = bound
        self.translator = translator
        self.context_length = bound.plan.requirements.context_length
        self._cache = bound.cache
        self._copies: dict[int, Sequence] = {}  # of those in the cache, by the sequence's id
        self._fed: dict[int, list[int]] = {}  # drafts in the cache behind a copy's tokens
        self._block: StepBlock | None = None
        self.steps = 0

    def draft(
        self, sequences: Seq[Sequence], max_drafts: Seq[int], confidence_threshold: Seq[float]
    ) -> list[list[int]]:
        """Drafts for each sequence, at most `max_drafts[i]`, ending with one less likely than
        `confidence_threshold[i]`.

        Fewer, or none, where its context ends or its cache is full.
        """
        guesses = [
            guess
            for s, room, least in zip(sequences, max_drafts, confidence_threshold, strict=True)
            if (guess := self._begin(s, room, least)) is not None
        ]
        guesses = self._entered(guesses)
        while still := [guess for guess in guesses if guess.is_open]:
            step = self._step(still)
            if not self._cache.fits(step):
                self._forget(still[-1].copy)  # the youngest goes without
                still[-1].room = 0
                continue
            self._advance(still, step)
        found = {
            g.target.id: self.translator.back(g.target, g.copy.tokens, g.drafts) for g in guesses
        }
        return [found.get(s.id, [])[:room] for s, room in zip(sequences, max_drafts, strict=True)]

    def _begin(self, target: Sequence, room: int, confidence_threshold: float) -> _Guess | None:
        """Bring the copy of a sequence up to date."""
        tokens = self.translator.there(target)
        if tokens is None:
            return None
        if self.context_length is not None:  # the last draft is never fed
            room = min(room, self.context_length + 1 - len(tokens))
        if room < 1:
            return None
        copy = self._copies.get(target.id)
        if copy is None:
            copy = Sequence(target.id, tokens, self._settings(target), sample=target.sample)
        else:
            self._truncate(copy, tokens)
        copy.prompt_length = target.prompt_length if self.translator.same else len(tokens)
        copy.tokens = tokens
        return _Guess(target, copy, room, confidence_threshold)

    def _settings(self, target: Sequence) -> Settings:
        """Those that shape the distribution; not what may have a memory, or a vocabulary apart."""
        own = target.settings
        if not self.translator.same:
            return Settings(max_new_tokens=ENDLESS, cache_salt=own.cache_salt)
        size = self.bound.model.config.get_text_config(decoder=True).vocab_size
        return drafting_settings(own, size)

    def _truncate(self, copy: Sequence, tokens: list[int]) -> None:
        """Take back what the cache holds of rejected drafts; at least one token is fed again."""
        held = [*copy.tokens, *self._fed.pop(copy.id, [])][: copy.num_cached]
        same = _common(held, tokens[:-1])
        if same < min(len(copy.tokens) - 1, copy.num_cached):  # another text: begin anew
            self._forget(copy)
        elif same < copy.num_cached:
            self._cache.truncate(copy, same)
            if (
                not copy.num_cached and self._cache.continuous
            ):  # it forgot all: to be admitted again
                self._forget(copy)

    def _entered(self, guesses: list[_Guess]) -> list[_Guess]:
        """Those whose copies are in the cache, or can be taken in now."""
        new = [guess for guess in guesses if guess.copy.id not in self._copies]
        if new and not self._cache.continuous:  # its rows enter together: all begin anew
            self._release(list(self._copies.values()))
            new = guesses
        refused = set()
        for guess in new:
            guess.copy.num_cached = 0
            if self._cache.admit(guess.copy):
                self._copies[guess.copy.id] = guess.copy
            else:
                refused.add(guess.copy.id)
        return [guess for guess in guesses if guess.copy.id not in refused]

    def _step(self, guesses: list[_Guess]) -> Step:
        """Each feeds what its cache lacks of its tokens, then its last draft."""
        scheduled = []
        for guess in guesses:
            copy = guess.copy
            count = min(CHUNK, max(0, len(copy.tokens) - copy.num_cached))
            scheduled.append(
                ScheduledSequence(copy, copy.num_cached, count, () if count else guess.drafts[-1:])
            )
        if not self._cache.continuous:  # there every row takes part in every step, in its place
            fed = {item.sequence.id: item for item in scheduled}
            rows = self._copies.values()
            scheduled = [
                fed.get(copy.id) or ScheduledSequence(copy, copy.num_cached, 0) for copy in rows
            ]
        return Step(scheduled)

    def _advance(self, guesses: list[_Guess], step: Step) -> None:
        """One forward call; each whose tokens are all read gets a draft."""
        logits = self._forward(step)
        self._cache.commit(step, [len(item.token_ids) for item in step.scheduled])
        self.steps += 1
        row = {}
        for at, item in enumerate(step.scheduled):
            row[item.sequence.id] = at
            self._fed.setdefault(item.sequence.id, []).extend(item.drafts)
        ready = [guess for guess in guesses if guess.copy.num_cached >= len(guess.copy.tokens)]
        if ready:
            self._choose(ready, self._rows(logits, [row[guess.copy.id] for guess in ready]))

    def _rows(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """The last logits of these rows."""
        if self._block is None or self._block.device != logits.device:
            self._block = StepBlock(logits.device)
        at = self._block.put(rows)
        self._block.send()
        return logits[:, -1].index_select(0, at)

    def _forward(self, step: Step) -> torch.Tensor:
        inputs = self._cache.prepare(step)
        try:
            return self.bound.forward(inputs)
        except JackfieldError:
            raise
        except Exception as error:
            ends, name = self.bound.plan.early_exit, type(self.bound.model).__name__
            who = "assistant_model, a" if ends is None else f"a draft by the first {ends} layers of"
            raise ExecutionError(
                f"{who} {name}, raised {error_text(error)}; mend it, or choose another decoding"
            ) from error

    def _choose(self, guesses: list[_Guess], logits: torch.Tensor) -> None:
        assert self._block is not None
        copies = [guess.copy for guess in guesses]
        chosen = drawn(copies, [guess.drafts for guess in guesses], logits, self._block)
        for guess, (token, probability) in zip(guesses, chosen, strict=True):
            guess.drafts.append(token)
            if not probability >= guess.confidence_threshold:  # also where it is not a number
                guess.room = len(guess.drafts)

    def _forget(self, copy: Sequence) -> None:
        self._release([copy])

    def _release(self, copies: Seq[Sequence]) -> None:
        self._cache.release(copies)
        for copy in copies:
            copy.num_cached = 0
            self._copies.pop(copy.id, None)
            self._fed.pop(copy.id, None)

    def release(self, sequences: Seq[Sequence]) -> None:
        """Forget the copies of these sequences; unknown ones are ignored."""
        self._release([self._copies[s.id] for s in sequences if s.id in self._copies])

    def observations(self) -> tuple[Observation, ...]:
        """What was observed to run of its plan."""
        plan, attention = self.bound.plan, self.bound.attention
        return (
            observe(
                "assistant attention",
                plan["attention"].registered,
                attention.tally,
                attention.source,
            ),
            observe("assistant cache", plan["cache"].registered, self.steps),
        )


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists have in common from the beginning on."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])


def draft_model(assistance: Assistance, beside: BoundModel, text: Text) -> DraftModel:
    """A draft model, bound in the room that is left beside another one."""
    usage = beside.cache.usage()
    room = beside.plan.room_beside(0 if usage is None else usage.num_bytes)
    bound = BoundModel(assistance.model, assistance.plan, *room)
    other = Text(assistance.tokenizer, vocab_size_of(bound.model))
    return DraftModel(bound, translator(text, other))
