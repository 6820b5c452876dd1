"""Whether drafts save time, as measured: strategies that lose it rest, and are tried again later.

The time of a step without drafts is known from steps that had none; where there were too few
lately, a few go without. A step with drafts costs the time of proposing and the extra time of
verifying, and gains tokens, each worth its share of a step without drafts. All of it is measured
by the number of running sequences: drafts that pay for one may not pay for thirty.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from jackfield.engine.speculation import Resting

WINDOW = 16  # steps over which a strategy is judged
PLAIN = 3  # steps without drafts, at least, that it is judged by
REMEMBERED = 9  # of those, the last ones
RECENT = 2 * WINDOW  # steps ago, at most, where they speak against drafts: texts grow
STALE = 512  # steps ago, at most, where they speak for them: texts may be short again
FIRST_REST = 64  # steps; each rest is twice as long as the one before, up to the longest
LONGEST_REST = 4096
OUTLIER = 3.0  # times the median: what is longer is something else's doing

#: In seconds, from anywhere. Tests have one that stands still, and then nothing is measured.
CLOCK: Callable[[], float] = time.perf_counter


class TimedStep(NamedTuple):
    """What one step of `rows` sequences took: proposing, and all the rest.

    `share` of its drafts are the strategy's, which gained `extra` tokens beyond one a sequence.
    """

    rows: int
    proposing: float
    rest: float
    share: float
    extra: int


@dataclass(slots=True)
class _Trial:
    """How one strategy does with about so many sequences, and for how many steps it rests."""

    steps: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=WINDOW))
    left: int = 0
    next_rest: int = FIRST_REST
    resting: Resting | None = None


class _Plain:
    """What steps without drafts take, of about so many sequences."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=REMEMBERED)
        self.age = 0  # steps since the last of them
        self.wanted = 0  # steps that go without drafts, to be measured

    def known(self, lately: int) -> bool:
        """Whether enough was measured, no longer ago than so many steps."""
        return len(self.seconds) >= PLAIN and self.age <= lately

    def measure(self) -> None:
        """Have the next few steps go without drafts; what was measured before is past."""
        self.seconds.clear()
        self.wanted = PLAIN


class DraftTiming:
    """Watches the steps of strategies that must make decoding `min_speedup` times as fast.

    Between `begin` and `end` of a step, `asks` says of each strategy that sequences want whether it
    is to be asked, and `proposed` is told what that took. `clock` is in seconds.
    """

    def __init__(
        self, min_speedup: Mapping[str, float], clock: Callable[[], float] | None = None
    ) -> None:
        self.clock = clock or CLOCK
        self._min_speedup = dict(min_speedup)
        self._trials: dict[tuple[str, int], _Trial] = defaultdict(_Trial)
        self._plain: dict[int, _Plain] = defaultdict(_Plain)
        self._rows, self._began = 0, 0.0
        self._proposing: dict[str, float] = {}
        self.rests = dict.fromkeys(min_speedup, 0)  # how often each was put to rest

    @property
    def resting(self) -> tuple[Resting, ...]:
        """Those that rest now, and why."""
        found = (trial.resting for trial in list(self._trials.values()) if trial.left)
        return tuple(one for one in found if one is not None)

    def begin(self, rows: int) -> None:
        """A step of `rows` sequences begins."""
        self._rows, self._proposing = rows, {}
        self._began = self.clock()

    def asks(self, name: str) -> bool:
        """Whether a strategy is asked in this step."""
        if name not in self._min_speedup:
            return True
        trial = self._trials[name, _about(self._rows)]
        if trial.left:
            trial.left -= 1
            return False
        return not self._plain[_about(self._rows)].wanted

    def proposed(self, name: str, seconds: float) -> None:
        self._proposing[name] = seconds

    def end(self, drafted: Mapping[str, tuple[int, int]]) -> list[Resting]:
        """A step has ended in which every sequence decoded; returns who rests from now on.

        `drafted`: of each strategy the drafts, and the tokens beyond one a sequence.
        """
        plain = self._plain[_about(self._rows)]
        rest = self.clock() - self._began - sum(self._proposing.values())
        total = sum(count for count, _ in drafted.values())
        plain.age, plain.wanted = plain.age + 1, max(0, plain.wanted - 1)
        if not total:
            plain.seconds.append(rest)
            plain.age = 0
        found = []
        for name in self._proposing.keys() & self._min_speedup.keys():
            count, extra = drafted.get(name, (0, 0))
            trial = self._trials[name, _about(self._rows)]
            share = count / total if total else 0.0
            trial.steps.append(TimedStep(self._rows, self._proposing[name], rest, share, extra))
            if (resting := self._judged(name, trial, plain)) is not None:
                found.append(resting)
        return found

    def _judged(self, name: str, trial: _Trial, plain: _Plain) -> Resting | None:
        """Why a strategy rests now; None: it does not."""
        if len(trial.steps) < WINDOW or not sum(s.proposing + s.rest for s in trial.steps):
            return None
        found = speedup(trial.steps, median(plain.seconds)) if plain.seconds else 0.0
        pays = found >= self._min_speedup[name]
        if not plain.known(STALE if pays else RECENT):
            plain.measure()
            return None
        trial.steps.clear()
        if pays:
            trial.next_rest = FIRST_REST
            return None
        self.rests[name] += 1
        trial.resting = Resting(name, self._rows, found, trial.next_rest, time.time())
        trial.left = trial.next_rest
        trial.next_rest = min(2 * trial.next_rest, LONGEST_REST)
        return trial.resting


def _about(rows: int) -> int:
    """Which numbers of sequences are measured together: 1, 2 and 3, 4 to 7, …"""
    return rows.bit_length()


def speedup(steps: deque[TimedStep], plain: float) -> float:
    """How many times as fast `steps` were as without drafts, a step of which takes `plain` s."""
    proposing = OUTLIER * median(step.proposing for step in steps)
    rests = [step.rest for step in steps if step.share]
    longest = OUTLIER * median(rests) if rests else 0.0
    without = taken = 0.0
    for step in steps:
        without += plain * (1 + step.extra / step.rows)
        verifying = step.share * (min(step.rest, longest) - plain)
        taken += plain + min(step.proposing, proposing) + verifying
    return without / taken if taken > 0 else 1.0
