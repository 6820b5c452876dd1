"""The climb: rung by rung, who is faster than the best so far takes its place, if it is as good."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jackfield.benchmarking.verdicts import Change
from jackfield.errors import ExecutionError, JackfieldError, UsageError
from jackfield.tuning.bounds import Bounds, Budget
from jackfield.tuning.candidates import RUNGS, WARM_UP, Candidate, Ladder, Quality, Starter
from jackfield.tuning.outcome import Outcome, Tried, told_change, told_quality
from jackfield.tuning.racing import FRESH, Racer, duel, most_rounds, race

Tell = Callable[[str], None]

AUTO, TAKEN = "auto", "taken"
#: How many times as long as one of the best a round of a warm-up may take, but for its first.
SLOW_START = 3.0


class Climb:
    """One search. `run` may be called once. What counts are the seconds of a `unit`."""

    def __init__(
        self,
        ladder: Ladder,
        start: Starter,
        bounds: Bounds,
        budget: Budget,
        tell: Tell,
        unit: str = "round",
    ) -> None:
        self._ladder, self._start, self._bounds = ladder, start, bounds
        self._budget, self._tell = budget, tell
        self._tried: list[Tried] = []
        self._noted: set[Racer] = set()
        self._open: list[Racer] = []
        self._ahead = list(RUNGS)
        self._unreached: list[str] = []
        self._decided: Outcome | None = None
        self._loading = self._judging = 0.0
        self._unit, self._begun, self._climbs = unit, False, False

    def run(self, fixed: Mapping[str, Any]) -> Outcome:
        """Climb from auto, with `fixed` arguments. Raises UsageError where the budget is too small
        for one step, and what auto itself raises. After Ctrl-C, or where anything else fails, it
        ends with the best so far.
        """
        try:
            before = self._budget.left()
            (auto,) = self._started([Candidate(AUTO, AUTO, dict(fixed))])
            self._loading = before - self._budget.left()
            self._auto = self._best = auto
            self._first()
            self._climbs = True
            while self._ahead:
                self._rung(self._ahead[0])
                self._ahead.pop(0)
            return self._end()
        except KeyboardInterrupt:
            if not self._begun:  # there is nothing yet
                raise
            return self._stopped("", interrupted=True)
        except (JackfieldError, OSError) as error:
            if not self._climbs or not self._auto.alive:
                raise
            return self._stopped(f" ({error})", interrupted=False)
        finally:
            for one in self._open:
                one.runner.close()

    def _stopped(self, why: str, *, interrupted: bool) -> Outcome:
        """The best so far. No process is asked anything: it may be in the middle of an answer."""
        if self._decided is not None:
            return replace(self._decided, interrupted=interrupted)
        self._tell(f"stopped{why}: what follows is the best so far, not compared with auto")
        verdicts = {self._best: TAKEN, self._auto: AUTO}
        for one in (*self._open, self._auto):
            self._note(one, verdicts.get(one, f"stopped after {len(one.times)} rounds"), asks=False)
        self._unreached += self._ahead
        return self._outcome(self._best, None, finished=False, interrupted=interrupted)

    def _first(self) -> None:
        """What auto takes and how good it is, and how long a step takes."""
        auto, budget = self._auto, self._budget
        auto.run()
        self._begun = auto.alive
        failed = auto.runner.error
        before = budget.left()
        if failed is None:
            try:
                self._quality(auto)
            except JackfieldError as error:
                failed = f"its quality cannot be measured: {error}"
        self._judging = before - budget.left()
        spent = budget.seconds - budget.left()
        if budget.left() <= 0:
            also = "" if failed is None else f" (auto: {failed})"
            raise UsageError(f"{self._too_small(f'more than {spent:.0f}')}{also}")
        if failed is not None:
            raise ExecutionError(f"auto: {failed}")
        least = self._cost(1) + self._reserve()
        if budget.left() < least:
            raise UsageError(self._too_small(f"about {spent + least:.0f}"))
        self._tell(
            f"auto: {auto.seconds:.3g} s a {self._unit}; loading took {self._loading:.0f} s"
            f"{told_quality(auto.quality)}"
        )

    def _too_small(self, takes: str) -> str:
        return (
            f"a budget of {self._budget.seconds:g} s is too small for one step, which takes "
            f"{takes} s here; give more with --budget, or fewer --requests"
        )

    def _cost(self, count: int) -> float:
        """Seconds until so many are loaded, two at a time, and warm, one after the other, and until
        one of them is known to be faster, if all take as long as the best.
        """
        rounds = most_rounds(count) + count // 2 * WARM_UP
        return self._loading * -(-count // 2) + rounds * self._best.cost

    def _reserve(self) -> float:
        """Seconds that judging a winner and the last race take."""
        return 2 * self._loading + self._judging + (2 * FRESH + WARM_UP) * self._auto.cost

    def _has_time(self) -> bool:
        return self._budget.left() > self._reserve()

    def _started(
        self, candidates: Sequence[Candidate], most: float = math.inf, least: float = 1.0
    ) -> list[Racer]:
        runners = self._start(candidates, most, least)
        found = [Racer(one, runner) for one, runner in zip(candidates, runners, strict=True)]
        self._open += found
        return found

    def _closed(self, racers: Iterable[Racer]) -> None:
        for one in racers:
            one.runner.close()
            self._open.remove(one)

    def _rung(self, name: str) -> None:
        if not self._has_time():  # nor to plan what could be tried
            self._unreached.append(name)
            self._tell(f"{name}: no time is left of {self._budget.seconds:g} s")
            return
        before = self._best
        try:
            rung = self._ladder.rung(name, before.candidate.arguments)
        except JackfieldError as error:  # memory that others hold meanwhile, say
            self._unreached.append(name)
            self._tell(f"{name}: stays as it is; what else there is cannot be planned now: {error}")
            return
        self._tried += [Tried(name, d.label, f"refused: {d.reason}") for d in rung.dropped]
        worth = self._worth(name, rung.candidates)
        if not worth:
            why = "nothing is left to measure" if rung.candidates else rung.why_none
            self._tell(f"{name}: stays {rung.now}; {why}")
            return
        racers = self._started(worth, SLOW_START * before.seconds)
        self._compete(racers)
        self._closed({*racers, before} - {self._best, self._auto})
        if self._best is before:
            self._tell(f"{name}: stays {rung.now}")

    def _worth(self, name: str, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose bounds leave them a chance, and for which there is time."""
        worth: list[Candidate] = []
        late = False
        for one in candidates:
            why = self._pruned(one, len(worth))
            if why is None and self._budget.left() < self._cost(len(worth) + 1) + self._reserve():
                why, late = f"no time is left of {self._budget.seconds:g} s", True
            if why is None:
                worth.append(one)
            else:
                self._tried.append(Tried(name, one.label, f"not measured: {why}", one.arguments))
                self._tell(f"{name}: {one.label} is not measured: {why}")
        if late and not worth:
            self._unreached.append(name)
        return worth

    def _pruned(self, one: Candidate, beside: int) -> str | None:
        best = self._best
        try:
            return self._ladder.prune(one, best.candidate.arguments, best.seconds, beside)
        except JackfieldError as error:
            return f"it cannot be planned now: {error}"

    def _compete(self, racers: Sequence[Racer]) -> None:
        """The fastest that is as good as auto takes the best's place; the others are noted."""
        left = []
        for one in racers:
            if one.alive and one.runner.behind is not None:
                behind = f"{one.runner.behind:.3g} s a {self._unit}"
                self._note(one, f"behind in its warm-up: {behind}")
            elif one.alive:
                left.append(one)
            else:
                self._note(one, f"failed: {one.runner.error}")
        while left and (found := race(self._best, left, self._has_time)) is not None:
            left.remove(found)
            if (why := self._reason_against(found)) is None:
                self._best = found
                self._note(found, TAKEN)
                break
            self._note(found, f"refused: {why}")
        self._lost(left)
        if not self._best.alive:
            self._fall_back()

    def _lost(self, racers: Sequence[Racer]) -> None:
        for one in racers:
            if one.alive and one.to_the_end and self._has_time():
                with contextlib.suppress(JackfieldError):  # it has failed then, as its row says
                    self._quality(one)
            failed = None if one.alive else f"failed: {one.runner.error}"
            self._note(one, failed or one.verdict or "not decided: the best before it failed")

    def _fall_back(self) -> None:
        """The best has failed, and what led to it counts no more. Raises ExecutionError where it
        is auto."""
        one, error = self._best, self._best.runner.error
        if one is self._auto:
            raise ExecutionError(f"auto: {error}")
        self._take_back(f"it failed: {error}")
        self._tell(f"{one.candidate.label} failed: {error}; what follows begins with auto again")
        self._best = self._auto

    def _take_back(self, why: str) -> None:
        """The selections are auto's after all, and the rows that were taken say so."""
        self._reword(TAKEN, f"taken, then dropped: {why}")

    def _reword(self, verdict: str, now: str) -> None:
        self._tried = [
            replace(one, verdict=now) if one.verdict == verdict else one for one in self._tried
        ]

    def _reason_against(self, one: Racer) -> str | None:
        """Why it may not take the place of the best; None: it may."""
        reasons = list(one.runner.flaws())
        if one.alive:
            try:
                lost = self._bounds.reason_against(self._quality(self._auto), self._quality(one))
            except JackfieldError as error:
                lost = f"its quality cannot be measured: {error}"
            reasons += [] if lost is None else [lost]
        return "; ".join(reasons) or None

    def _quality(self, one: Racer) -> Quality:
        if one.quality is None:
            one.quality = one.runner.quality()
        return one.quality

    def _note(self, one: Racer, verdict: str, *, asks: bool = True) -> None:
        """Keep what was measured of it, once, and say it in a sentence."""
        if one in self._noted:
            return
        peak = one.runner.peak_bytes() if asks and one.alive else None
        rung, label = one.candidate.rung, one.candidate.label
        change = None if one is self._auto else one.change
        given, times = one.candidate.arguments, tuple(one.every)
        self._tried.append(Tried(rung, label, verdict, given, times, change, peak, one.quality))
        self._noted.add(one)
        if one is not self._auto:
            read = told_quality(one.quality)
            self._tell(f"{rung}: {label}{told_change(change)}: {verdict}{read}")

    def _end(self) -> Outcome:
        """Compare with auto, which stays where the best is not faster with confidence."""
        auto = self._auto
        self._note(auto, AUTO)
        if self._best is auto:
            late = f"; no time for: {', '.join(self._unreached)}" if self._unreached else ""
            said = f"auto, since nothing else was faster for certain and as good{late}"
            self._decided = self._outcome(auto, None)
        else:
            said = self._last_race(*self._anew(auto, self._best))
        self._tell(f"in the end: {said}")
        assert self._decided is not None
        return self._decided

    def _anew(self, auto: Racer, best: Racer) -> list[Racer]:
        """Both in other processes: one of many that was the fastest may owe that to its process."""
        self._closed((auto, best))
        both = [replace(one.candidate, rung=AUTO) for one in (auto, best)]
        found = self._started(both, least=3 * self._loading)
        self._noted.update(found)
        return found

    def _last_race(self, auto: Racer, best: Racer) -> str:
        """Decide, and say how: before anything else is asked, so that no Ctrl-C undoes it."""
        faster = duel(auto, best, lambda: True)  # whatever time there is: it says what this is
        said = f"the best{told_change(best.change, 'auto')}"
        if faster:
            self._decided = self._outcome(best, best.change)
            return f"{said}: it is the profile"
        if not (best.alive or auto.alive):
            raise ExecutionError(f"auto: {auto.runner.error}; the best: {best.runner.error}")
        if not auto.alive:
            self._reword(AUTO, f"failed in the end: {auto.runner.error}")
            self._decided = self._outcome(best, None, finished=False)
            return f"auto failed: {auto.runner.error}; the best is the profile"
        if not best.alive:
            self._take_back(f"it failed in the end: {best.runner.error}")
            self._decided = self._outcome(auto, None)
            return f"the best failed: {best.runner.error}; the profile is auto's"
        self._take_back("in the end not faster than auto for certain")
        self._decided = self._outcome(auto, best.change)
        return f"{said}: {best.verdict}, so the profile says what auto chooses"

    def _outcome(
        self, one: Racer, change: Change | None, *, finished: bool = True, interrupted: bool = False
    ) -> Outcome:
        given, unreached = one.candidate.arguments, tuple(self._unreached)
        return Outcome(given, self._tried, change, finished, interrupted, unreached)
