"""Selections as processes: loaded two at a time, measured, judged, and asked how good they are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jackfield.benchmarking.contenders import Contender
from jackfield.benchmarking.judging import judged
from jackfield.benchmarking.nursery import Nursery
from jackfield.benchmarking.results import Round
from jackfield.benchmarking.running import PAUSE, Running
from jackfield.benchmarking.workload import Workload
from jackfield.errors import ExecutionError
from jackfield.planning.memory import STEP_ROWS
from jackfield.spelling import AUTO
from jackfield.tuning.candidates import WARM_UP, Candidate, Quality

#: What share of the time that is left a candidate may take to load, and for its warm-up.
PATIENCE = 0.25
#: A round that takes so many times as long as the longest of its warm-up hangs. Where no time is
#: left it may take so many times the shortest: the last race is run to its end. Seconds that it
#: always may take.
GRACE, LEAST = 10.0, 10.0
#: How many are loaded at once, while nothing is measured.
AT_ONCE = 2


@dataclass(frozen=True)
class Question:
    """What quality is measured by: token ids of a text, and (prompt, answer, new tokens)."""

    text: Sequence[int]
    answers: Sequence[tuple[Any, str, int]] = ()


class Process:
    """A selection in a process of its own (`candidates.Runner`).

    `left` are the seconds of the budget, of which it may take a `share` to load, and to warm up, or
    `least` seconds where that is more.
    """

    def __init__(
        self,
        running: Running,
        workload: Workload,
        question: Question,
        left: Callable[[], float],
        share: float,
        least: float,
        *,
        lossy: bool,
    ) -> None:
        self._running, self._workload, self._question = running, workload, question
        self._left, self._share, self._kept, self._least = left, share, 0.0, least
        self._lossy, self._number, self._closed = lossy, 0, False
        self._open = contextlib.ExitStack()
        self.behind: float | None = None
        running.left = self._allowed

    def _allowed(self) -> float:
        """Seconds that what is asked next may take."""
        return max(self._least, self._left() - self._kept)

    def _rest(self) -> float:
        """Seconds for what no race waits for."""
        return max(1.0, self._left())

    def start(self) -> None:
        if not self._closed:
            self._kept = self._left() * (1 - self._share)
            self._running.start(self._open)

    def warm_up(self, most: float) -> None:
        def hopeless(one: Round) -> bool:
            seconds = self._figure(one)
            self.behind = seconds if seconds > most else None
            return self.behind is not None

        self._kept = self._left() * (1 - self._share)
        self._running.warm_up(WARM_UP, hopeless)
        self._kept = 0.0
        if times := self._running.row.warm_up:
            self._least = max(LEAST, GRACE * min(times))
            self._running.seconds = max(LEAST, GRACE * max(times))

    @property
    def error(self) -> str | None:
        return None if self._running.error is None else str(self._running.error)

    def round(self) -> float | None:
        before = len(self._running.row.rounds)
        self._running.round(self._number)
        self._number += 1
        rounds = self._running.row.rounds
        return self._figure(rounds[-1]) if len(rounds) > before else None

    @property
    def took(self) -> float:
        return self._running.row.rounds[-1].seconds + PAUSE

    def _figure(self, one: Round) -> float:
        """Seconds of the round; where requests come one by one, those of a request."""
        work = self._workload
        if not work.waits or one.first is None:
            return one.seconds
        later = work.new_tokens / len(work.requests) - 1
        return one.first + (one.per_token or 0.0) * later

    def flaws(self) -> Sequence[str]:
        self._running.observe()
        rows, texts, nursery = [self._running.row], [self._running.texts], self._running.nursery
        (row,) = judged(rows, texts, self._workload, nursery, self._rest)
        if row.valid and not self._lossy and (row.parity or {}).get("lossy"):
            return ("it rounds on purpose, which is taken with --quantize only",)
        return row.reasons

    def quality(self) -> Quality:
        asked, most = self._question, self._rest()
        given = {"text": list(asked.text), "answers": list(asked.answers)}
        found = self._running.ask("quality", most, **given)
        if found is None:
            raise ExecutionError(self.error or "it does not answer")
        return Quality(**found)

    def peak_bytes(self) -> int | None:
        self._running.observe()
        return self._running.row.peak_bytes

    def close(self) -> None:
        self._closed = True
        if self._running.worker is not None:
            self._running.worker.close()
        self._open.close()


@dataclass(frozen=True)
class Processes:
    """Starts selections of `model` (`candidates.Starter`), in the seconds that are `left`."""

    model: Mapping[str, Any]
    workload: Workload
    question: Question
    left: Callable[[], float]
    lossy: bool = False
    nursery: Nursery | None = None

    def __call__(
        self, candidates: Sequence[Candidate], most: float, least: float
    ) -> Sequence[Process]:
        made = [self._process(one, least) for one in candidates]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                list(pool.map(Process.start, made))
                for one in made:
                    one.warm_up(most)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for one in made:
                    one.close()
                raise
        return made

    def _process(self, candidate: Candidate, least: float) -> Process:
        given = {"max_batch_size": STEP_ROWS, **candidate.arguments, **self.model}
        contender = Contender(candidate.label, given)
        running = Running(contender, self.workload, math.inf, math.inf, self.nursery)
        share = 1.0 if candidate.rung == AUTO else PATIENCE
        asked = self.workload, self.question, self.left, share, least
        return Process(running, *asked, lossy=self.lossy)
