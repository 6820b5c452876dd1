"""A race: who of several is faster than the best so far, in as few rounds as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from jackfield.benchmarking.results import ordered
from jackfield.benchmarking.verdicts import FEWEST, Change, Verdict, paired
from jackfield.tuning.candidates import Candidate, Runner

#: After so many rounds the slower half of those that challenge goes (successive halving), and who
#: takes so many times as long as the best does.
STAGES, HOPELESS = (2, 4, 6), 1.5
#: Rounds after which a race ends, decided or not.
MOST = 12
#: By what share two may differ and count as the same.
MARGIN = 0.02


@dataclass(eq=False)
class Racer:
    """Who runs, and the seconds of each round of the race that it is in, and of all."""

    candidate: Candidate
    runner: Runner
    times: list[float] = field(default_factory=list)
    every: list[float] = field(default_factory=list)

    def run(self) -> None:
        if (seconds := self.runner.round()) is not None:
            self.times.append(seconds)
            self.every.append(seconds)

    @property
    def alive(self) -> bool:
        return self.runner.error is None

    @property
    def seconds(self) -> float:
        """Of a round, the median of all."""
        return median(self.every)

    def beside(self, other: Racer) -> Change:
        """How many times as long as the other one it takes, in the rounds that both were in."""
        count = min(len(self.times), len(other.times))
        return paired(other.times[:count], self.times[:count], margin=MARGIN)


def race(best: Racer, others: Sequence[Racer], has_time: Callable[[], bool]) -> Racer | None:
    """Run `best` and the others in turn; the one that is faster than `best` with confidence.

    None: nobody is, or there is no time to tell. Those that fell behind have fewer rounds.
    """
    for one in (best, *others):
        one.times.clear()
    challengers = list(others)
    for number in range(MOST):
        if not has_time():
            return None
        for one in ordered([best, *challengers], number):
            one.run()
        challengers = _staying(best, [one for one in challengers if one.alive], number + 1)
        if not challengers or not best.alive:
            return None
        if number + 1 >= FEWEST:
            (front,) = challengers
            if front.beside(best).verdict is not Verdict.UNDECIDED:
                break
    return front if front.beside(best).verdict is Verdict.FASTER else None


def _staying(best: Racer, challengers: list[Racer], rounds: int) -> list[Racer]:
    if rounds not in STAGES or not best.alive:
        return challengers
    ranked = sorted(challengers, key=lambda one: median(one.times))
    most = 1 if rounds == STAGES[-1] else -(-len(ranked) // 2)
    bound = HOPELESS * median(best.times)
    return [one for one in ranked[:most] if median(one.times) <= bound]
