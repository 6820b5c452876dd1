"""The strategies that an engine offers, and the one sampler that decides for all of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from jackfield.contracts import Accepted, Decision, Search, Settings, StepBlock, Strategy
from jackfield.engine.assistant import DraftModel
from jackfield.engine.bound import BoundModel
from jackfield.engine.checked_search import CheckedSearch, checked
from jackfield.engine.draft_timing import DraftTiming
from jackfield.engine.mtp import HeadDrafts
from jackfield.engine.searching import Searcher
from jackfield.engine.sequences import RunningGroup, RunningSequence
from jackfield.engine.speculation import Resting, Speculation, total
from jackfield.engine.steps import RunningStep, ScheduledRunning
from jackfield.errors import quoted
from jackfield.guarded import all_of, fault
from jackfield.requests.text_errors import complete_too_soon
from jackfield.sampling.constraint import Wanted
from jackfield.sampling.drafted import Drafted
from jackfield.sampling.fenced import OwnFailure, fenced
from jackfield.sampling.sampler import ChosenTokens, Sampler
from jackfield.sampling.structured import Structures

logger = logging.getLogger("jackfield")

_NOTHING = Accepted()


@dataclass(frozen=True)
class StepChoice:
    """What was chosen in a step, on its way to the host.

    Of `ready`, the places in the step of those that get a token, `own` are those for whom the
    sampler has `chosen`; `beside` says of those with guidance where their pair is. `decided` is
    what is said of groups, whose sequences gain nothing by themselves.
    """

    ready: Seq[int] = ()
    own: Seq[int] = ()
    beside: Mapping[int, int] = field(default_factory=dict)
    chosen: ChosenTokens | None = None
    decided: Seq[tuple[RunningGroup, Decision]] = ()


class Decoder:
    """Asks each sequence's strategy for drafts, and the sampler which of them are right.

    `strategies` are those that a request can choose by name; those in `drafting` propose. `calls`
    counts the steps that each took part in, `totals` what its drafts did.
    """

    def __init__(
        self,
        strategies: Mapping[str, Strategy],
        drafting: frozenset[str] = frozenset(),
        structures: Structures | None = None,
    ) -> None:
        self.strategies = dict(strategies)
        self.drafting = drafting
        self.calls: Counter[str] = Counter()
        self.totals = {name: Drafted() for name in strategies}
        fast = {name: self.strategies[name].min_speedup for name in sorted(drafting)}
        self.timing = DraftTiming({name: least for name, least in fast.items() if least})
        self._structures = structures
        self._allowed: Future[torch.Tensor] | None = None
        self._advance = _within
        self._sampler = Sampler()
        searches = {n: s for n, s in self.strategies.items() if isinstance(s, CheckedSearch)}
        self.searcher = Searcher(searches) if searches else None

    def propose(self, sequences: Seq[RunningSequence]) -> list[list[int]]:
        """Drafts for each sequence; none for one that reads its prompt or has a cooldown."""
        if not self.drafting:
            return [[] for _ in sequences]
        self.timing.begin(len(sequences))
        found: dict[int, list[int]] = {}
        for name in self.drafting:
            own = [s for s in sequences if s.settings.decoding == name and _decodes(s)]
            if own and self.timing.asks(name):
                begin = self.timing.clock()
                found |= self._proposed(name, own)
                self.timing.proposed(name, self.timing.clock() - begin)
        return [found.get(sequence.answer.id, []) for sequence in sequences]

    def _proposed(self, name: str, sequences: Seq[RunningSequence]) -> dict[int, list[int]]:
        """What a strategy guesses for those that have room and no cooldown, by their `id`."""
        max_drafts = {s: room for s in sequences if (room := _room(s))}
        if not max_drafts:
            return {}
        drafts = self.strategies[name].propose(list(max_drafts), list(max_drafts.values()))
        return {s.id: own for s, own in zip(max_drafts, drafts, strict=True)}

    def expect(self, step: RunningStep) -> None:
        """Send what the sampler needs, and find out while the model computes what may follow."""
        if self._structures is not None:
            wanted = _structured(step)
            self._allowed = self._structures.begin(wanted) if wanted else None
        if self._sampler.sends:
            own = [f for f in step.scheduled if f.samples and _has_a_row(f.sequence)]
            self._sampler.expect([f.sequence for f in own], [f.drafts for f in own])

    def choose(self, step: RunningStep, logits: torch.Tensor) -> StepChoice:
        """Have tokens chosen by `logits` (`[scheduled, k, vocab]`, may be modified in place).

        The last `1 + len(drafts)` positions of a row's k are those of its last own token and its
        drafts. One that does not reach the end of its sequence gains nothing.
        """
        for name in {item.sequence.settings.decoding for item in step.scheduled}:
            self.calls[name] += 1
        ready = [i for i, item in enumerate(step.scheduled) if item.samples]
        allowed = None if self._allowed is None else self._found(self._allowed)
        decided: Seq[tuple[RunningGroup, Decision]] = ()
        if self.searcher is not None:
            ready, allowed, decided = self._search(self.searcher, step, logits, ready, allowed)
        if not ready:
            return StepChoice(decided=decided)
        own = [i for i in ready if _has_a_row(step.scheduled[i].sequence)]
        scheduled = [step.scheduled[i] for i in own]
        drafts = [item.drafts for item in scheduled]
        block = self._sampler.block(logits.device)
        rows = _rows(logits, own, drafts, block)
        beside = {} if len(own) == len(ready) else _negative(step, own)
        negative = [step.scheduled[i].drafts for i in beside]
        led_from = _rows(logits, [*beside.values()], negative, block) if beside else None
        sequences = [item.sequence for item in scheduled]
        chosen = self._sampler.choose(sequences, rows, drafts, allowed, led_from)
        return StepChoice(ready, own, beside, chosen, decided)

    def accept(self, step: RunningStep, choice: StepChoice) -> list[Accepted]:
        """What each sequence of `step` gains by its `choice`, once it is there."""
        gains = [_NOTHING] * len(step.scheduled)
        if choice.chosen is not None:
            for i, gain in zip(choice.own, choice.chosen.gains(), strict=True):
                item = step.scheduled[i]
                constrained = item.sequence.constraint is not None
                gains[i] = self._advance(item.sequence, gain) if constrained else gain
                if self.drafting:
                    self._learn(item, gain)
            for i, at in choice.beside.items():
                gains[at] = Accepted(gains[i].tokens)
        if self.drafting and step.decode and len(choice.ready) == len(gains):
            self._time(step, gains)
        return gains

    def blind(self, step: RunningStep) -> bool:
        """Whether what follows can be chosen before anybody has read what is chosen in `step`."""
        return (
            not self.drafting
            and self._sampler.blind
            and all(
                item.sequence.unit is None and item.sequence.constraint is None
                for item in step.scheduled
            )
        )

    def _found(self, allowed: Future[torch.Tensor]) -> torch.Tensor:
        """What may follow; waits where the model was faster."""
        return allowed.result()

    def _time(self, step: RunningStep, gains: Seq[Accepted]) -> None:
        """Count the step in which all decoded, and tell of whom it puts to rest."""
        drafted: dict[str, tuple[int, int]] = {}
        for item, gain in zip(step.scheduled, gains, strict=True):
            if item.drafts and _has_a_row(item.sequence):
                name = item.sequence.settings.decoding
                count, extra = drafted.get(name, (0, 0))
                drafted[name] = (count + len(item.drafts), extra + max(0, len(gain.tokens) - 1))
        for one in self.timing.end(drafted):
            logger.info("%s: no drafts for %d steps", one, one.steps)

    def _search(
        self,
        searcher: Searcher,
        step: RunningStep,
        logits: torch.Tensor,
        ready: list[int],
        allowed: torch.Tensor | None,
    ) -> tuple[list[int], torch.Tensor | None, Seq[tuple[RunningGroup, Decision]]]:
        """Let groups be decided; returns what is left for the sampler of `ready` and `allowed`."""
        mine = [i for i in ready if step.scheduled[i].sequence.group is not None]
        if not mine:
            return ready, allowed, ()
        scheduled = [step.scheduled[i] for i in mine]
        block = self._sampler.block(logits.device)
        bits, others = _parted(allowed, [step.scheduled[i] for i in ready])
        decided = searcher.decide(
            scheduled, _rows(logits, mine, [()] * len(mine), block), bits, block
        )
        return [i for i in ready if step.scheduled[i].sequence.group is None], others, decided

    def _learn(self, item: ScheduledRunning, gain: Accepted) -> None:
        sequence = item.sequence
        name = sequence.settings.decoding
        right = item.kept(gain) - item.num_tokens
        self.totals[name].count(len(gain.tokens), len(item.drafts), right)
        sequence.drafted.count(len(gain.tokens), len(item.drafts), right)
        judged = item.drafts and sequence.drafted.cool_down(
            self.strategies[name].min_acceptance_rate
        )
        if judged:
            self.totals[name].cooldowns += 1
            logger.info(
                "request %d: %s was right in %d of its last %d drafts: none for %d tokens",
                sequence.id, name, *judged, sequence.drafted.cooldown,
            )  # fmt: skip

    def width(self, settings: Settings) -> int | None:
        """How many beams a request has; None where its strategy does not search."""
        strategy = self.strategies[settings.decoding]
        return strategy.width(settings) if isinstance(strategy, CheckedSearch) else None

    @property
    def resting(self) -> tuple[Resting, ...]:
        """The strategies whose drafts lost time, and are none now."""
        return self.timing.resting

    def speculation(self) -> Speculation | None:
        """What the drafts of all strategies did; None where none drafts."""
        drafted = [self.totals[name] for name in self.drafting]
        return total(drafted, sum(self.timing.rests.values()), self.resting)

    def release(self, sequences: Seq[RunningSequence]) -> None:
        searching = () if self.searcher is None else self.searcher.strategies
        strategies = [self.strategies[name] for name in (*self.drafting, *searching)]
        all_of(partial(strategy.release, sequences) for strategy in strategies)

    def rest(self) -> None:
        """Nothing runs and nothing waits: keep no sequence."""
        self._allowed = None
        self._sampler.rest()


def _within(sequence: RunningSequence, gain: Accepted) -> Accepted:
    """The same, and whether it completes what the text must look like."""
    constraint = sequence.constraint
    if constraint is None:
        return gain
    try:
        end = fenced("structure", sequence.id, lambda: constraint.advance(gain.tokens))
    except OwnFailure as failure:
        return replace(gain, error=str(failure))
    if (cause := constraint.error) is not None:
        return replace(gain, error=cause)
    if end is None:
        return gain
    gain = replace(gain, tokens=gain.tokens[:end])
    least, new = sequence.settings.min_new_tokens, sequence.num_new + end
    if new < least:
        return replace(gain, error=complete_too_soon(new, least))
    return replace(gain, ends=True)


def _structured(step: RunningStep) -> list[Wanted]:
    """The texts with a structure whose next token is wanted."""
    return [
        Wanted(item.sequence.id, item.sequence.constraint, item.drafts)
        for item in step.scheduled
        if item.samples and item.sequence.constraint is not None
    ]


def _parted(
    allowed: torch.Tensor | None, scheduled: Seq[ScheduledRunning]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The rows of `allowed` (those of sequences with a constraint) of groups, and of all others;
    None where there are none.
    """
    if allowed is None:
        return None, None
    of_group = torch.tensor(
        [
            item.sequence.group is not None
            for item in scheduled
            if item.sequence.constraint is not None
            for _ in range(1 + len(item.drafts))
        ]
    )
    own, others = allowed[of_group], allowed[~of_group]
    return own if len(own) else None, others if len(others) else None


def _decodes(sequence: RunningSequence) -> bool:
    """Whether it, and its pair, have one token left to feed; of a pair one alone asks."""
    if sequence.answer is not sequence:
        return False
    return all(len(one.tokens) - one.num_cached == 1 for one in sequence.abreast)


def _has_a_row(sequence: RunningSequence) -> bool:
    """Whether the sampler chooses its tokens: no search does, and it is no negative prompt."""
    return sequence.group is None and sequence.answer is sequence


def _negative(step: RunningStep, own: Seq[int]) -> dict[int, int]:
    """Of those in `own` that have guidance: where in `step` they are, and where their pair is."""
    at = {item.sequence.id: i for i, item in enumerate(step.scheduled)}
    pairs = {i: step.scheduled[i].sequence.pair for i in own}
    return {i: at[pair.members[1].id] for i, pair in pairs.items() if pair is not None}


def _room(sequence: RunningSequence) -> int:
    """How many drafts a sequence that decodes can use: the last new token is never fed."""
    if sequence.drafted.in_cooldown():
        return 0
    return sequence.settings.max_new_tokens - sequence.num_new - 1


def _rows(
    logits: torch.Tensor, ready: list[int], drafts: Seq[Seq[int]], block: StepBlock
) -> torch.Tensor:
    """The logits that the sampler reads, `[rows, vocab]`."""
    count, width, _ = logits.shape
    if not any(drafts) and len(ready) == count:
        return logits[:, -1]
    flat = [
        i * width + at
        for i, own in zip(ready, drafts, strict=True)
        for at in range(width - 1 - len(own), width)
    ]
    rows = block.put(flat)
    block.send()
    return logits.flatten(0, 1).index_select(0, rows)


def strategies_of(
    model: BoundModel, draft: DraftModel | None, heads: HeadDrafts | None, vocab_size: int
) -> tuple[dict[str, Strategy], frozenset[str]]:
    """The strategies of the plan, bound and checked, and the names of those that draft."""
    bound: dict[str, Strategy] = {}
    drafting = set()
    for name, choice in model.plan.decodings.items():
        assistant = heads if choice.backend.capabilities.heads else draft
        strategy = choice.registered.bind(
            replace(model.context("decoding", choice), assistant=assistant)
        )
        if isinstance(strategy, Search) != choice.backend.capabilities.forks:
            what = f"bind returned {quoted(strategy)}, and only a Search declares forks=True"
            raise fault(choice.registered, what)
        bound[name] = checked(strategy, str(choice.registered), vocab_size)
        if choice.backend.capabilities.rollback:
            drafting.add(name)
    return bound, frozenset(drafting)
