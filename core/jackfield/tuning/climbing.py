"""The climb: rung by rung, who is faster than the best so far takes its place, if it is as good."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from jackfield.benchmarking.verdicts import FEWEST, Change
from jackfield.errors import ExecutionError, JackfieldError, UsageError
from jackfield.tuning.bounds import Bounds, Budget
from jackfield.tuning.candidates import RUNGS, Candidate, Ladder, Quality, Starter
from jackfield.tuning.racing import Racer, race

Tell = Callable[[str], None]

AUTO, TAKEN = "auto", "taken"


@dataclass(frozen=True)
class Tried:
    """What was tried, and what became of it.

    `times` are the seconds of its rounds; none: it was not measured. `change` is beside the best at
    that time. `verdict` is "auto", "taken", "slower", "not faster", or why it was refused.
    """

    rung: str
    label: str
    verdict: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    times: Sequence[float] = ()
    change: Change | None = None
    peak_bytes: int | None = None
    quality: Quality | None = None

    @property
    def seconds(self) -> float | None:
        return median(self.times) if self.times else None


@dataclass(frozen=True)
class Outcome:
    """What the climb ends with: arguments of `jackfield.load`, and all that was tried.

    `finished` is false where it was interrupted: the best was not compared with auto.
    """

    arguments: Mapping[str, Any]
    tried: Sequence[Tried]
    change: Change | None
    finished: bool


class Climb:
    """One search. `run` may be called once."""

    def __init__(
        self, ladder: Ladder, start: Starter, bounds: Bounds, budget: Budget, tell: Tell
    ) -> None:
        self._ladder, self._start, self._bounds = ladder, start, bounds
        self._budget, self._tell = budget, tell
        self._tried: list[Tried] = []
        self._open: list[Racer] = []
        self._qualities: dict[int, Quality] = {}
        self._loading = 0.0

    def run(self, fixed: Mapping[str, Any]) -> Outcome:
        """Climb from auto, with `fixed` arguments. Raises UsageError where the budget is too small
        for one step, and what auto itself raises; after Ctrl-C it ends with the best so far.
        """
        best = auto = None
        try:
            best = auto = self._first(fixed)
            for rung in RUNGS:
                best = self._rung(rung, best, auto)
            return self._end(best, auto)
        except KeyboardInterrupt:
            if auto is None or best is None or not auto.every:
                raise
            self._note(auto, AUTO)
            self._tell("stopped: what follows is the best so far, not compared with auto")
            return Outcome(best.candidate.arguments, self._tried, None, False)
        finally:
            for one in self._open:
                one.runner.close()

    def _first(self, fixed: Mapping[str, Any]) -> Racer:
        """Auto, and how long a step takes."""
        before = self._budget.left()
        (auto,) = self._started([Candidate(AUTO, AUTO, dict(fixed))])
        self._loading = before - self._budget.left()
        auto.run()
        if auto.runner.error is not None and self._budget.left() <= 0:
            raise UsageError(
                f"in a budget of {self._budget.seconds:g} s not even auto has loaded and run once; "
                "give more with --budget, or fewer --requests"
            )
        if auto.runner.error is not None:
            raise ExecutionError(f"auto: {auto.runner.error}")
        least = self._loading + self._cost(1) + self._reserve(auto)
        if self._budget.left() < least - self._loading:
            raise UsageError(
                f"a budget of {self._budget.seconds:g} s is too small for one step, which takes "
                f"about {least:.0f} s here; give more with --budget, or fewer --requests"
            )
        self._tell(f"auto: {auto.seconds:.3g} s a round; loading took {self._loading:.0f} s")
        return auto

    def _cost(self, count: int) -> float:
        """Seconds until so many are loaded, two at a time."""
        return self._loading * -(-count // 2)

    def _reserve(self, auto: Racer) -> float:
        """Seconds that judging a winner and the last race take."""
        return self._loading + 2 * FEWEST * auto.seconds

    def _started(self, candidates: Sequence[Candidate]) -> list[Racer]:
        found = [
            Racer(one, runner)
            for one, runner in zip(candidates, self._start(candidates), strict=True)
        ]
        self._open += found
        return found

    def _rung(self, name: str, best: Racer, auto: Racer) -> Racer:
        rung = self._ladder.rung(name, best.candidate.arguments)
        self._tried += [Tried(name, d.label, f"refused: {d.reason}") for d in rung.dropped]
        worth = self._worth(name, rung.candidates, best, auto)
        if not worth:
            why = "nothing is left to measure" if rung.candidates else rung.why_none
            self._tell(f"{name}: stays {rung.now}; {why}")
            return best
        racers = self._started(worth)
        winner = self._winner(racers, best, auto)
        for one in racers:
            if one is not winner:
                self._let_go(one)
        if winner is None:
            self._tell(f"{name}: stays {rung.now}")
            return best
        if best is not auto:
            self._let_go(best)
        return winner

    def _worth(
        self, name: str, candidates: Sequence[Candidate], best: Racer, auto: Racer
    ) -> list[Candidate]:
        """Those whose bounds leave them a chance, and for which there is time."""
        worth: list[Candidate] = []
        for one in candidates:
            why = self._ladder.prune(one, best.candidate.arguments, best.seconds, len(worth))
            if why is None and self._budget.left() < self._cost(len(worth) + 1) + (
                self._reserve(auto) + 4 * (len(worth) + 2) * best.seconds
            ):
                why = f"no time is left of {self._budget.seconds:g} s"
            if why is None:
                worth.append(one)
            else:
                self._tried.append(Tried(name, one.label, f"not measured: {why}", one.arguments))
                self._tell(f"{name}: {one.label} is not measured: {why}")
        return worth

    def _winner(self, racers: Sequence[Racer], best: Racer, auto: Racer) -> Racer | None:
        """The fastest that is as good as auto; the others are noted with what they lack."""
        left = [one for one in racers if one.alive]
        for one in racers:
            if not one.alive:
                self._note(one, f"failed: {one.runner.error}")
        while left:
            found = race(best, left, lambda: self._budget.left() > self._reserve(auto))
            if not best.alive:
                raise ExecutionError(f"{best.candidate.label}: {best.runner.error}")
            if found is None:
                break
            left.remove(found)
            if (why := self._reason_against(found, auto)) is None:
                self._note(found, TAKEN, found.beside(best))
                self._lost(left, best)
                return found
            self._note(found, f"refused: {why}", found.beside(best))
        self._lost(left, best)
        return None

    def _lost(self, racers: Sequence[Racer], best: Racer) -> None:
        for one in racers:
            if not one.alive:
                self._note(one, f"failed: {one.runner.error}")
            elif not one.times:
                self._note(one, "not measured: no time was left")
            else:
                change = one.beside(best)
                slower = change.ratio > 1
                self._note(one, "slower" if slower else "not faster for certain", change)

    def _reason_against(self, one: Racer, auto: Racer) -> str | None:
        """Why it may not take the place of the best; None: it may."""
        if flaws := one.runner.flaws():
            return "; ".join(flaws)
        try:
            return self._bounds.reason_against(self._quality(auto), self._quality(one))
        except JackfieldError as error:
            return f"its quality cannot be measured: {error}"

    def _quality(self, one: Racer) -> Quality:
        if id(one) not in self._qualities:
            self._qualities[id(one)] = one.runner.quality()
        return self._qualities[id(one)]

    def _note(self, one: Racer, verdict: str, change: Change | None = None) -> None:
        """Keep what was measured of it, and say it in a sentence."""
        peak = one.runner.peak_bytes() if one.alive else None
        quality = self._qualities.get(id(one))
        rung, label = one.candidate.rung, one.candidate.label
        given, times = one.candidate.arguments, tuple(one.every)
        self._tried.append(Tried(rung, label, verdict, given, times, change, peak, quality))
        if rung != AUTO:
            self._tell(f"{rung}: {label}{_sentence(change)}: {verdict}{_read(quality)}")

    def _let_go(self, one: Racer) -> None:
        self._open.remove(one)
        one.runner.close()

    def _end(self, best: Racer, auto: Racer) -> Outcome:
        """Compare with auto, which stays where the best is not faster with confidence."""
        if best is auto:
            self._note(auto, AUTO)
            self._tell("in the end: auto, since nothing was faster for certain")
            return Outcome(auto.candidate.arguments, self._tried, None, True)
        fewest = FEWEST  # which are run whatever time there is: they say what the profile is
        faster = (
            race(auto, [best], lambda: self._budget.left() > 0 or len(best.times) < fewest) is best
        )
        self._note(auto, AUTO)
        change = best.beside(auto) if best.times else None
        said = f"in the end: the best{_sentence(change, 'auto')}"
        if faster:
            self._tell(f"{said}: it is the profile")
            return Outcome(best.candidate.arguments, self._tried, change, True)
        self._tell(f"{said}: that is not faster for certain, so the profile says what auto chooses")
        return Outcome(auto.candidate.arguments, self._tried, change, True)


def _sentence(change: Change | None, beside: str = "the best before") -> str:
    if change is None:
        return ""
    known = f"{change.low:.2f} to {change.high:.2f} in " if change.low > 0 else ""
    return (
        f" takes {change.ratio:.2f} times as long as {beside} "
        f"({known}{change.rounds} round{'s' if change.rounds > 1 else ''})"
    )


def _read(quality: Quality | None) -> str:
    if quality is None:
        return ""
    answers = f", {quality.right} of {quality.total} answers right" if quality.total else ""
    return f"; perplexity {quality.perplexity:.4g}{answers}"
