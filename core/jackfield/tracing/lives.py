"""The lives of requests: when each waited, read its prompt, decoded, and was handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jackfield.contracts import Step
from jackfield.tracing.recorder import Fed

WAITING, PREFILL, DECODE, EMITTING = PHASES = ("waiting", "prefill", "decode", "emitting")
KEPT = 10_000  # requests that have ended


class Traced(Protocol):
    """What is read of a sequence that runs. Times in seconds of `time.perf_counter`."""

    id: int
    started: float
    first_token_at: float | None
    finish_reason: Any
    num_found: int | None
    preemptions: int
    prompt_length: int
    num_cached: int

    @property
    def num_prompt_tokens(self) -> int:
        """What a caller's prompt has."""

    @property
    def num_new(self) -> int:
        """How many new tokens it has."""

    @property
    def members(self) -> Seq[Any]:
        """Itself, or all of its group."""


class Phase(NamedTuple):
    """From `begin` to `end`, in ns."""

    name: str
    begin: int
    end: int


@dataclass
class Life:
    """One request. Times are in ns of `time.perf_counter_ns`.

    `came` is when it was made, `changes` has each phase and when it began; `end` is None while it
    goes on. One that `began` before the trace has no phases from before it.
    """

    id: int
    prompt_tokens: int
    came: int
    changes: list[tuple[str, int]]
    began: bool = False
    end: int | None = None
    first_token: int | None = None
    new_tokens: int = 0
    found_tokens: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    outcome: str | None = None
    sequence: Any = field(default=None, repr=False)

    @property
    def phase(self) -> str:
        return self.changes[-1][0]

    def enter(self, phase: str, now: int) -> None:
        if phase != self.phase:
            self.changes.append((phase, now))

    def phases(self, until: int) -> list[Phase]:
        """Each of them up to the next, the last one up to its end, or `until`."""
        end = until if self.end is None else self.end
        ends = [begin for _, begin in self.changes[1:]] + [end]
        return [
            Phase(name, begin, max(begin, after))
            for (name, begin), after in zip(self.changes, ends, strict=True)
        ]

    def spent(self, phase: str, until: int) -> int:
        return sum(one.end - one.begin for one in self.phases(until) if one.name == phase)

    def read(self) -> None:
        """Note what its sequence knows by now."""
        one = self.sequence
        self.new_tokens, self.preemptions = one.num_new, one.preemptions
        self.found_tokens, self.outcome = one.num_found or 0, one.finish_reason
        self.first_token = None if one.first_token_at is None else _ns(one.first_token_at)


class Lives:
    """Follows requests. Called by the thread that takes steps; all times are handed in, in ns."""

    def __init__(self) -> None:
        self._open: dict[int, Life] = {}
        self._reached: list[Life] = []  # the end of their prompts, in the step that goes on
        self._ending: list[Life] = []
        self._ended: deque[Life] = deque(maxlen=KEPT)
        self._count = 0

    def came(self, sequence: Traced) -> None:
        """A request was handed to the loop."""
        came = _ns(sequence.started)
        self._add(sequence, Life(sequence.id, sequence.num_prompt_tokens, came, [(WAITING, came)]))

    def here(self, sequence: Traced, *, runs: bool, now: int) -> None:
        """A request was there before the trace began."""
        reads = sequence.num_cached < sequence.prompt_length
        phase = (PREFILL if reads else DECODE) if runs else WAITING
        life = Life(
            sequence.id, sequence.num_prompt_tokens, _ns(sequence.started), [(phase, now)], True
        )
        self._add(sequence, life)

    def _add(self, sequence: Traced, life: Life) -> None:
        life.sequence = sequence
        self._open[sequence.id] = life

    def _of(self, sequence: Any) -> list[Life]:
        """Those that are told of what happens to a sequence: all of its group."""
        found = self._open
        return [found[one.id] for one in sequence.members if one.id in found]

    def entered(self, sequence: Traced, now: int) -> None:
        for life in self._of(sequence):
            life.enter(PREFILL, now)

    def preempted(self, sequence: Traced, now: int) -> None:
        for life in self._of(sequence):
            life.enter(WAITING, now)

    def fed(self, step: Step) -> Fed:
        """A step is prepared."""
        fed, self._reached, prompts = [], [], False
        told: set[int] = set()  # a group or a pair takes part once
        for item in step.scheduled:
            one: Any = item.sequence
            fed.append((one.id, item.num_tokens + len(item.drafts)))
            for life in self._of(one):
                if life.id in told:
                    continue
                told.add(life.id)
                if life.phase == DECODE:
                    life.decode_steps += 1
                    continue
                life.prefill_steps += 1
                prompts = True  # also one whose last token alone is fed
                if item.samples:
                    self._reached.append(life)
        return Fed(tuple(fed), step.decode and not prompts)

    def stepped(self, now: int) -> None:
        """That step has ended: who reached the end of a prompt decodes from now on."""
        reached, self._reached = self._reached, []
        for life in reached:
            if life.phase == PREFILL:
                life.enter(DECODE, now)

    def released(self, sequences: Iterable[Traced], now: int) -> None:
        """These have left the loop; what is left is to hand them out."""
        for sequence in sequences:
            life = self._open.pop(sequence.id, None)
            if life is not None:
                life.enter(EMITTING, now)
                self._ending.append(life)

    def over(self, now: int) -> None:
        """What had left the loop was handed out."""
        for life in self._ending:
            life.end = now
            life.read()
            life.sequence = None  # its tokens are not the trace's to keep
            self._ended.append(life)
            self._count += 1
        self._ending.clear()

    @property
    def dropped(self) -> int:
        """How many have ended that are not kept."""
        return self._count - len(self._ended)

    def told(self, now: int) -> list[Life]:
        """All that are kept, by number; nobody is followed from now on."""
        self.over(now)
        left, self._open = list(self._open.values()), {}
        for life in left:
            life.read()
            life.sequence = None
        return sorted([*self._ended, *left], key=lambda life: life.id)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
