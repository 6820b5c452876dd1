"""A race: who of several is faster than the best so far, in as few rounds as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from jackfield.benchmarking.results import ordered
from jackfield.benchmarking.verdicts import Change, Verdict, paired
from jackfield.tuning.candidates import Candidate, Quality, Runner

#: After so many rounds the slower half of those that challenge goes (successive halving), in the
#: end all but one, and at once who takes so many times as long as the best.
STAGES, HOPELESS = (2, 4), 1.5
#: Rounds that only the best and who is left run then. Nobody was chosen by them, so they alone say
#: whether it is faster; who is behind after the first few of them goes.
FRESH, EARLY = 8, 3
#: By what share two may differ and count as the same.
MARGIN = 0.02


@dataclass(eq=False)
class Racer:
    """Who runs, with the seconds of each round of the stage that it is in, and of all; `took` are
    those by the clock.

    `verdict` says how its last race ended where it was not faster, and `change` how it was beside
    the best, where that was looked at.
    """

    candidate: Candidate
    runner: Runner
    times: list[float] = field(default_factory=list)
    every: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    change: Change | None = None
    verdict: str = ""
    quality: Quality | None = None

    def run(self) -> None:
        if (seconds := self.runner.round()) is not None:
            self.times.append(seconds)
            self.every.append(seconds)
            self.took.append(self.runner.took)

    @property
    def alive(self) -> bool:
        return self.runner.error is None

    @property
    def seconds(self) -> float:
        """What counts of a round, the median of all."""
        return median(self.every)

    @property
    def cost(self) -> float:
        """Seconds of a round by the clock."""
        return median(self.took)

    @property
    def to_the_end(self) -> bool:
        """Whether its last race was decided by all rounds."""
        return self.change is not None and self.change.rounds == FRESH

    def begin(self) -> None:
        self.times.clear()
        self.change, self.verdict = None, ""

    def leave(self, best: Racer) -> None:
        """It is out before the end of the race."""
        self.change = self.beside(best)
        why = "behind" if self.change.ratio > 1 else "another was faster"
        self.verdict = f"{why} after {len(self.times)} rounds"

    def out_of_time(self) -> None:
        rounds = f"{len(self.times)} round{'' if len(self.times) == 1 else 's'}"
        self.verdict = f"no time was left after {rounds}"

    def beside(self, other: Racer) -> Change:
        """How many times as long as the other one it takes, in the rounds that both were in."""
        count = min(len(self.times), len(other.times))
        return paired(other.times[:count], self.times[:count], margin=MARGIN)


def most_rounds(count: int) -> int:
    """How many rounds a race of so many beside the best takes at most, of all together."""
    later = (STAGES[1] - STAGES[0]) * (-(-count // 2) + 1) if count > 2 else 0
    return STAGES[0] * (count + 1) + later + 2 * FRESH


def race(best: Racer, others: Sequence[Racer], has_time: Callable[[], bool]) -> Racer | None:
    """Run `best` and the others in turn; the one that is faster than `best` with confidence.

    None: nobody is, or there is no time to tell, or somebody has failed on whom it hangs. Those
    that fell behind have fewer rounds.
    """
    front = _front(best, others, has_time)
    return front if front is not None and duel(best, front, has_time) else None


def duel(best: Racer, front: Racer, has_time: Callable[[], bool]) -> bool:
    """Whether `front` is faster than `best` with confidence, in rounds that begin now.

    It is looked at once, at their end: an interval that is read again and again, or of the fastest
    of many in the rounds that chose it, is wrong more often than it says.
    """
    best.begin()
    front.begin()
    for number in range(FRESH):
        if not has_time():
            front.out_of_time()
            return False
        for one in ordered([best, front], number):
            one.run()
        if not (best.alive and front.alive):
            return False
        if number + 1 == EARLY and front.beside(best).ratio > 1:
            front.leave(best)
            return False
    front.change = front.beside(best)
    found = front.change.verdict
    front.verdict = "slower" if found is Verdict.SLOWER else "not faster for certain"
    return found is Verdict.FASTER


def _front(best: Racer, others: Sequence[Racer], has_time: Callable[[], bool]) -> Racer | None:
    """The fastest by a few rounds; None: all are far behind the best, or nobody can tell."""
    for one in (best, *others):
        one.begin()
    left = list(others)
    for number in range(STAGES[-1]):
        if not has_time():
            for one in left:
                one.out_of_time()
            return None
        for one in ordered([best, *left], number):
            one.run()
        left = [one for one in left if one.alive]
        if not best.alive:
            return None
        if number + 1 in STAGES:
            left = _staying(best, left, last=number + 1 == STAGES[-1])
            if len(left) == 1:
                break
        if not left:
            return None
    return left[0]


def _staying(best: Racer, challengers: list[Racer], *, last: bool) -> list[Racer]:
    ranked = sorted(challengers, key=lambda one: median(one.times))
    bound = HOPELESS * median(best.times)
    stay = [one for one in ranked if median(one.times) <= bound]
    stay = stay[: 1 if last else -(-len(ranked) // 2)]
    for one in ranked:
        if one not in stay:
            one.leave(best)
    return stay
