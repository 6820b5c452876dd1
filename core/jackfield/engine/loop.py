"""The loop: one request or a thousand, plain or speculative, padded or packed.

Reads from top to bottom; its parts stand in the order in which a step calls them. Everything it
calls was bound once: no plugin machinery in here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from jackfield.contracts import Accepted, Decision, KVCache, ModelInputs
from jackfield.engine.ahead import Begun, feed, unread
from jackfield.engine.batch_limits import UNLIMITED, BatchLimits
from jackfield.engine.checked_schedule import CheckedSchedule
from jackfield.engine.decoder import Decoder
from jackfield.engine.encoded import EncodedCache
from jackfield.engine.mtp import HeadDrafts
from jackfield.engine.sequences import RunningGroup, RunningSequence
from jackfield.engine.stateful import StatefulCache
from jackfield.engine.statistics import Metrics
from jackfield.engine.step_features import StepFeatures
from jackfield.engine.step_images import StepImages
from jackfield.engine.steps import Event, RunningStep, ScheduledRunning
from jackfield.engine.taking import cancelled, ended, taken
from jackfield.engine.token_budget import TokenBudget
from jackfield.engine.waiting import SequenceHeap, WaitingQueue
from jackfield.errors import CacheFullError, first_line
from jackfield.guarded import all_of, fault
from jackfield.sampling.fenced import OwnFailure

logger = logging.getLogger("jackfield")


class Loop:
    """Runs sequences to their end. Not thread-safe: one caller steps. `steps` counts them.

    `clock` is the one that schedulers are told, in seconds. `overlaps`: a step may be begun before
    the tokens of the one before are read.
    """

    def __init__(
        self,
        forward: Callable[[ModelInputs], torch.Tensor],
        cache: KVCache,
        decoding: Decoder,
        scheduler: CheckedSchedule,
        limits: BatchLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.forward = forward
        self.cache = cache
        # States of a prompt are no one else's, and an encoder's go with the request that reads it:
        # nobody waits until another has read it.
        own = isinstance(cache, StatefulCache | EncodedCache)
        self._finds_prompts = cache.continuous and not own
        self.decoding = decoding
        self.scheduler = scheduler
        self.limits = limits
        self._pace = limits.pace and TokenBudget(*limits.pace)
        self._max_chunk_size = limits.max_chunk_size
        self.waiting: WaitingQueue[RunningSequence] = WaitingQueue(scheduler)
        self.running: list[RunningSequence] = []
        self._timed: SequenceHeap[RunningSequence] = SequenceHeap()  # by their deadlines
        self._full = False  # the cache refused who is next, and holds no less since
        self.overlaps = False
        self._begun: Begun | Exception | None = None  # the next step, or why it cannot be begun
        self._leaving: list[RunningSequence] = []  # those in it whose text has ended
        self.adapting: Callable[[RunningStep, ModelInputs], AbstractContextManager[None]] = _plain
        self.verifying: Callable[[RunningStep, ModelInputs, torch.Tensor], None] | None = None
        self.images: StepImages | StepFeatures | None = None
        self.heads: HeadDrafts | None = None
        self._take = taken  # an attribute, which a trace replaces
        self.steps = 0
        self.turns = 0  # steps that were begun: what was observed before one is past after it
        self.doing: str | None = None  # what of a step is no plugin's and takes long
        self.metrics = Metrics()

    def submit(self, sequence: RunningSequence) -> None:
        """Let a sequence wait for its turn; of a group only the first one, which runs for all.

        A pair waits as one, too, for two places.
        """
        if sequence.deadline is not None:
            self._timed.push(sequence, sequence.deadline)
        if sequence is not sequence.members[0]:
            return
        now = self.clock()
        for one in sequence.members:
            one.arrival = now
        self.waiting.add(sequence)
        self._full = False
        self.metrics.tokens_in += sequence.num_prompt_tokens

    def cancel(self, sequence: RunningSequence, why: str | None = None) -> list[Event]:
        """End a sequence wherever it is, and its group; nothing is computed for it from now on."""
        if sequence.finish_reason is not None:
            return []
        group = sequence.group
        gains = [(sequence, Accepted())] if group is None else group.so_far()
        events = [cancelled(one, gain, why) for one, gain in gains]
        for one in sequence.members:
            self.waiting.discard(one)
        self._retire([one for one, _ in gains])
        return events

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Make every running sequence one step longer. Requires work: `waiting` or `running`."""
        self.turns += 1
        late = self._expire()
        if self._begun is None:
            late += self._admit()
            late += self._starved()
        begin = self.clock()  # images that were read are none of what tokens cost
        if not self.running:  # whatever waited came too late
            return late
        begun = self._take_up()
        if begun is None:
            begun = self._begin(self._fitting(self.decoding.propose(self.running)))
        step, overlaps = begun.step, self._may_overlap(begun)
        if overlaps:
            self._commit(step, begun.kept)
            self._begun = self._following(begun)
        accepted = self.decoding.accept(step, begun.choice)
        if not overlaps:
            self._commit(step, [f.kept(a) for f, a in zip(step.scheduled, accepted, strict=True)])
        if any(item.num_tokens > 1 for item in step.scheduled):
            self._full = False  # a window holds less than its prompt did
        events = late + self._emit(step, accepted, begun.choice.decided)
        if self._pace is not None:
            self._pace.count(step.scheduled, self.clock() - begin, waited=begun.waited)
        return events

    def _expire(self) -> list[Event]:
        """End the requests whose deadline has passed."""
        now, events = time.perf_counter(), []
        while (late := self._timed.first()) is not None and now > (late.deadline or now):
            self._timed.discard(late)
            events += self.cancel(late, f"its deadline of {late.settings.deadline:g} s passed")
        return events

    def _admit(self) -> list[Event]:
        """Let in who is next, while there are places; who does not fit yet holds up the rest.

        Who has images or features enters once the model has read them all, and holds up nobody
        until then. Where there is no place, images of who is next are read all the same. Returns
        what requests say whose images cannot be read, and which end.
        """
        self._rank()
        events: list[Event] = []
        if not self.waiting:
            return events
        closed = self._full or (self.running and not self.cache.continuous)
        free, now = 0 if closed else self._places(), self.clock()
        if self.images is not None:
            self.images.begin(alone=not self.running, room=free > 0)
        while (sequence := self.waiting.first(now)) is not None:
            if self._waits_for_its_leader(sequence):
                self.waiting.put_aside(sequence)
                continue
            if self.images is not None and (why := self._unread(self.images, sequence)):
                events += self._failed(sequence, why)
                continue
            if self.images is not None and self.images.unread(sequence):
                self.waiting.pass_over(sequence)
                if free < 1:
                    break
                continue
            free -= len(sequence.members)
            if free < 0:
                break
            try:
                enters = self._enters(sequence)
            except OwnFailure as failure:  # of an encoder, over its prompt
                events += self._failed(sequence, str(failure))
                free += len(sequence.members)
                continue
            if not enters:
                if not self.running:
                    raise fault(self.cache, "admits nobody although nothing runs in it")
                self._full = True
                break
            self.waiting.discard(sequence)
        return events

    def _rank(self) -> None:
        """Have the scheduler place who has come, and who has waited for a prompt that is read."""
        for leader in self.running if self.waiting.leaders else ():
            if leader.has_read:
                self.waiting.call_back(leader)
        self.waiting.rank()

    def _waits_for_its_leader(self, sequence: RunningSequence) -> bool:
        """Whether the prompt it shares is still being read by another, to be found in the cache."""
        leader = sequence.leader
        return (
            self._finds_prompts
            and leader is not None
            and leader.finish_reason is None
            and not leader.has_read
        )

    def _unread(self, images: StepImages | StepFeatures, sequence: RunningSequence) -> str | None:
        """Why its images or features cannot be read, alone of all; None: they can be."""
        self.doing = f"reading {images.what}"
        try:
            images.read(sequence)
        except OwnFailure as failure:
            return str(failure)
        finally:
            self.doing = None
        return None

    def _places(self) -> int:
        """How many may enter beside those that run, and beams of theirs that are to come."""
        groups = {s.group for s in self.running if s.group is not None}
        coming = sum(group.width - len(group.beams) for group in groups)
        return self.limits.max_batch_size - len(self.running) - coming

    def _enters(self, sequence: RunningSequence) -> bool:
        """Whether the cache takes in a sequence, and with it the other beams, or its pair."""
        beams = sequence.abreast
        for at, beam in enumerate(beams):
            if not self.cache.admit(beam):
                for other in beams[:at]:
                    self.cache.preempt(other)
                return False
        for beam in beams:
            beam.num_found = beam.num_cached if beam.num_found is None else beam.num_found
        self.running += beams
        return True

    def _starved(self) -> list[Event]:
        """End the requests that the scheduler passes over for ever, by its name."""
        events: list[Event] = []
        for sequence in self.scheduler.starved():
            why = f"{self.scheduler} passed it over {sequence.passed_over} times in a row"
            events += self._failed(sequence, why)
        return events

    def _failed(self, sequence: RunningSequence, why: str) -> list[Event]:
        """End a request by an error that came before its first step, or between two."""
        events = self.cancel(sequence.members[0], why)
        for event in events:
            event.sequence.finish_reason = "error"
        return events

    def _take_up(self) -> Begun | None:
        """The step that was begun already. Raises why it could not be."""
        begun, self._begun = self._begun, None
        if isinstance(begun, Exception):
            raise begun
        return begun

    def _fitting(self, drafts: Seq[list[int]]) -> RunningStep:
        """The next step. Where it does not fit into the cache, the youngest is preempted."""
        proposed = dict(zip(self.running, drafts, strict=True))
        while True:
            step = self._schedule(proposed)
            if self.cache.fits(step):
                return step
            if any(item.drafts for item in step.scheduled):  # a guess is not worth a preemption
                proposed = {s: [] for s in self.running}
                continue
            if len({s.unit or s for s in self.running}) == 1:
                raise CacheFullError(
                    f"{self.cache} has no room for a sequence of {len(self.running[0].tokens)} "
                    "tokens, when nothing else runs; make it larger"
                )
            self._preempt(max(self.running, key=lambda s: (-s.settings.priority, s.id)).answer)

    def _schedule(
        self, drafts: dict[RunningSequence, list[int]], uncached: Seq[int] | None = None
    ) -> RunningStep:
        """Every running sequence feeds what is not cached yet: its prompt, then a token a step."""
        if uncached is None:
            uncached = list(map(self._num_uncached, self.running))
        budget = self._token_budget(uncached)
        wanted = self.scheduler.schedule(self.running, uncached, budget, self.clock())
        if self.limits.whole_chunks:
            wanted = [
                n if n == all_of_it else 0 for n, all_of_it in zip(wanted, uncached, strict=True)
            ]
            if not any(wanted):
                raise fault(self.scheduler, "schedule gives nobody all of its uncached tokens")
        counts = self._unparted(self.cache.adjust_schedule(self.running, wanted))
        scheduled, padded = [], not self.cache.continuous
        for sequence, count in zip(self.running, counts, strict=True):
            if count or padded:
                item = ScheduledRunning(sequence, sequence.num_cached, count, drafts[sequence])
                if item.drafts and not item.samples:
                    item = replace(item, drafts=())
                scheduled.append(item)
        return RunningStep(scheduled)

    def _num_uncached(self, sequence: RunningSequence) -> int:
        """How many tokens it can feed in this step."""
        left = len(sequence.tokens) - sequence.num_cached
        if left == 1:
            return 1
        if self.limits.whole_chunks:  # a preempted one goes through its new tokens one by one again
            left = max(1, sequence.prompt_length - sequence.num_cached)
            left -= left > 1 and sequence.pair is not None  # in no piece that others decide
        most = min(left, self._max_chunk_size or left)
        return most if self.images is None else self.images.may_feed(sequence, most)

    def _token_budget(self, uncached: Seq[int]) -> int:
        """How many tokens all may feed together; without a reader no stream waits for a step."""
        if self._pace is None or not any(sequence.streams for sequence in self.running):
            return self.limits.max_batch_tokens or UNLIMITED
        decoding = sum(count == 1 for count in uncached)
        full = self._full or self._places() < 1
        crowded = full and bool(self.waiting) and 4 * decoding >= 3 * len(uncached)
        return self._pace.tokens(decoding, len(uncached) - decoding, crowded=crowded)

    def _unparted(self, counts: list[int]) -> list[int]:
        """No step has a part of a group, of a pair or of an image whose tokens see one another."""
        grouped = self.decoding.searcher is not None or any(s.pair for s in self.running)
        most = self.limits.max_batch_tokens or UNLIMITED
        if grouped:
            counts = self._together(counts)
        if self.images is None:
            return counts
        whole = self.images.whole(self.running, counts, most)
        # Who waits for an image's step to have room may be a part of a pair.
        return self._together(whole) if grouped and whole != counts else whole

    def _together(self, counts: list[int]) -> list[int]:
        """Groups and pairs decode as a whole: who is ready before the rest keeps its last token."""
        rows = list(zip(self.running, counts, strict=True))
        behind = {s.unit for s, n in rows if s.num_cached + n < len(s.tokens)} - {None}
        if not behind:
            return counts
        held = [
            n - 1 if n and s.unit in behind and s.num_cached + n == len(s.tokens) else n
            for s, n in rows
        ]
        if not any(held) and not self.limits.whole_chunks:
            # Of a pair one may be ready, and the scheduler looks at those: its turn is the other's.
            held = [int(s.unit in behind and len(s.tokens) - s.num_cached > 1) for s, _ in rows]
        if not any(held):
            raise fault(self.scheduler, "schedule gives no request all of its sequences")
        return held

    def _preempt(self, sequence: RunningSequence) -> None:
        """Take a sequence out, and with it the other beams, or its pair; the first one waits."""
        beams = sequence.abreast
        for beam in beams:
            self.running.remove(beam)
            self.cache.preempt(beam)
            if self.heads is not None:  # which have room for what runs
                self.heads.release([beam])
            beam.preemptions += 1
        self.waiting.add(beams[0])
        self.metrics.preemptions += 1

    def _begin(self, step: RunningStep, before: Begun | None = None) -> Begun:
        """Have a step computed, and its tokens chosen; those of `before` are what it feeds."""
        self.decoding.expect(step)
        inputs = self.cache.prepare(step)
        if before is not None:
            feed(inputs, step, before)
        if self.images is not None:
            inputs = self.images.put_into(step, inputs)
        with self.adapting(step, inputs):
            self.doing = "the model's forward call"
            if self.heads is not None:
                self.heads.begin()
            logits = self.forward(inputs)
            if self.heads is not None:
                self.heads.take(step, inputs)
            self.doing = None
            if self.verifying is not None:
                self.verifying(step, inputs, logits)
        self.steps += 1
        self.metrics.began(step)
        waited = _is_waited_for(step, logits)  # afterwards there are more tokens
        return Begun(step, self.decoding.choose(step, logits), waited)

    def _may_overlap(self, begun: Begun) -> bool:
        """Whether the next step needs no more of this one than the ids that it chose.

        Who waits and could enter then is not passed over.
        """
        if not self.overlaps or self.images is not None or self.verifying is not None:
            return False
        step, going = begun.step, sum(not item.ended for item in begun.step.scheduled)
        if len(begun.choice.own) != len(step.scheduled) or going != len(self.running):
            return False
        closed = not self.waiting or self._full or self._places() < 1
        return closed and self.decoding.blind(step)

    def _following(self, begun: Begun) -> Begun | Exception | None:
        """The step behind `begun`, begun as well; None: there is none, or no room for it now."""
        going = begun.goes_on
        if not going:
            return None
        running, self.running = self.running, going
        try:
            step = self._schedule({sequence: [] for sequence in going}, [1] * len(going))
            if not self.cache.fits(step):
                return None
            with unread(going):
                return self._begin(step, begun)
        except Exception as error:  # noqa: BLE001 - raised once all have the tokens they gained
            self.doing = None
            return error
        finally:
            self.running = running

    def _commit(self, step: RunningStep, kept: Seq[int]) -> None:
        """Keep what a step fed; those whose text had ended when it was computed leave with it."""
        self.cache.commit(step, kept)
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            self.cache.release(leaving)

    def _emit(
        self,
        step: RunningStep,
        accepted: Seq[Accepted],
        decided: Seq[tuple[RunningGroup, Decision]],
    ) -> list[Event]:
        events, finished = [], []
        for item, gain in zip(step.scheduled, accepted, strict=True):
            sequence = item.sequence
            if sequence.answer is not sequence or not (gain.tokens or gain.error):
                continue  # it gets what another gains, or has read a part of its prompt
            if item.ended:
                continue  # when this step was begun, nobody knew
            if gain.error is not None:
                sequence.fail(gain.error)
            events.append(self._take(sequence, gain))
            if sequence.pair is not None:
                sequence.pair.follow()
            if sequence.finish_reason is not None:
                finished.append(sequence)
        if decided:
            found = self._branch(decided)
            events += found
            finished += [event.sequence for event in found]
        self._retire(finished)
        self.metrics.count(events)
        return events

    def _branch(self, decided: Seq[tuple[RunningGroup, Decision]]) -> list[Event]:
        """Go on with the beams that were decided on; returns what groups say that have ended."""
        copies: list[tuple[RunningSequence, RunningSequence]] = []
        dropped: list[RunningSequence] = []
        events = []
        for group, decision in decided:
            if decision.beams and decision.error is None:
                group.hypotheses = decision.hypotheses
                parting, left = group.grow(decision.beams)
                copies += parting
                dropped += left
            else:
                events += [ended(s, gain) for s, gain in group.final_gains(decision)]
        if copies or dropped:
            self.cache.fork(copies, dropped)
            gone = {sequence.id for sequence in dropped}
            self.running = [s for s in self.running if s.id not in gone]
            self.running += [into for _, into in copies]
        return events

    def _retire(self, finished: Seq[RunningSequence]) -> None:
        if finished:
            gone = {one.id for sequence in finished for one in sequence.members}
            self.running = [s for s in self.running if s.id not in gone]
            self._full = False
            self.metrics.ended(finished)
            self._release(finished)
            if not self.running:
                self._settle()

    def _release(self, finished: Seq[RunningSequence]) -> None:
        sequences = [one for sequence in finished for one in sequence.members]
        for sequence in sequences:
            self._timed.discard(sequence)
            self.waiting.call_back(sequence)
        acts = [lambda: self._leave(sequences), lambda: self.decoding.release(sequences)]
        if not (self.running or self.waiting):
            acts.append(self.decoding.rest)
        all_of(acts)

    def _leave(self, sequences: list[RunningSequence]) -> None:
        """Have the cache forget these; what it has prepared already comes first."""
        if isinstance(self._begun, Begun):
            self._leaving += sequences
        else:
            self.cache.release(sequences)

    def _settle(self) -> None:
        """Nobody is left in the step that was begun."""
        begun, self._begun = self._begun, None
        if isinstance(begun, Begun):
            self._commit(begun.step, begun.kept)
        elif begun is not None:
            logger.warning("a step that nobody waits for any more failed: %s", first_line(begun))

    def reset(self) -> None:
        """Give everything back after a failure; what was running or waiting is lost."""
        self.doing = self._begun = None
        lost, leaving = [*self.running, *self.waiting], self._leaving
        self.running, self._leaving, self._full = [], [], False
        self.waiting.clear()
        for sequence in lost:
            sequence.finish_reason = "error"  # nobody waits for it as the reader of a shared prompt
        all_of([lambda: self.cache.release(leaving), lambda: self._release(lost)])


def _plain(step: RunningStep, inputs: ModelInputs) -> AbstractContextManager[None]:
    """Steps of a model as it is, or with one adapter in its modules."""
    return nullcontext()


def _is_waited_for(step: RunningStep, logits: torch.Tensor) -> bool:
    """Whether a step has ended when its tokens are there: a device is read by who chooses one."""
    return any(item.samples for item in step.scheduled) or logits.device.type == "cpu"
