"""One replica: jackfield's own queue, scheduler and step budget, around a model that takes time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from fleet.requests import Request
from fleet.speed import Speed
from jackfield.contracts import Schedule
from jackfield.engine.token_budget import TARGET_STEP_SECONDS, TokenBudget
from jackfield.engine.waiting import WaitingQueue
from jackfield.planning.memory import STEP_TOKENS

AT_ONCE = 64  # decode steps that are computed together where nothing changes between them


class Fed(NamedTuple):
    """What `TokenBudget` looks at of those that a step feeds."""

    num_tokens: int


@dataclass(frozen=True)
class Steps:
    """Steps under way, alike: `counts` tokens for each that runs, `seconds` each."""

    begin: float
    seconds: float
    number: int
    counts: list[int]

    @property
    def end(self) -> float:
        return self.begin + self.number * self.seconds

    def whole_by(self, now: float) -> int:
        """How many are over when that one is over that runs now."""
        return min(self.number, int((now - self.begin) / self.seconds) + 1)


class Replica:
    """Takes requests and times, returns who has ended. `places` run at once at most."""

    def __init__(self, name: str, speed: Speed, schedule: Schedule, places: int) -> None:
        self.name, self.version = name, 0
        self._speed, self._schedule, self._places = speed, schedule, places
        self.clear()

    def clear(self) -> None:
        """It is started anew, without anybody."""
        self.waiting: WaitingQueue[Request] = WaitingQueue(self._schedule)
        self.running: list[Request] = []
        self.steps: Steps | None = None
        self.read = self.found = 0  # tokens of prompts, and how many of them were cached
        self._prefixes: OrderedDict[int, list[int]] = OrderedDict()  # [tokens, who use it]
        self._used = 0  # tokens that nobody can do without
        self._kept = 0  # of beginnings that nobody uses now
        self._budget = TokenBudget(TARGET_STEP_SECONDS, STEP_TOKENS)

    def add(self, request: Request) -> None:
        """Let it wait."""
        self.waiting.add(request)

    def begin(self, now: float) -> float | None:
        """Begin what comes next; returns when it is over, None: there is nothing to do."""
        self._admit(now)
        if not self.running:
            return None
        uncached = [len(s.tokens) - s.num_cached for s in self.running]
        decoding = uncached.count(1)
        budget = self._budget.tokens(decoding)
        counts = self._schedule.schedule(self.running, uncached, budget, now)
        alone = decoding == len(self.running)
        number = min(AT_ONCE, *(s.left for s in self.running)) if alone else 1
        number = max(1, min(number, (self._speed.room - self._used) // len(self.running)))
        context = sum(s.num_cached for s in self.running) + number * decoding // 2
        pairs = sum(n * s.num_cached for n, s in zip(counts, self.running, strict=True) if n > 1)
        seconds = self._speed.step(sum(counts), context, pairs)
        self.steps = Steps(now, seconds, number, counts)
        return self.steps.end

    def finish(self, now: float) -> list[Request]:
        """What was under way is over, as far as it is by `now`; returns who has ended."""
        assert self.steps is not None
        steps, self.steps = self.steps, None
        number = min(steps.number, max(1, round((now - steps.begin) / steps.seconds)))
        ended = []
        for request, count in zip(self.running, steps.counts, strict=True):
            request.num_cached += count * number
            if request.num_cached < len(request.tokens) and number == 1:
                continue  # a part of its prompt
            self._grow(request, number)
            if request.first is None:
                request.first = steps.begin + steps.seconds
            if request.left <= 0:
                request.ended, request.fate = now, "done"
                ended.append(request)
        self._count(steps, number)
        for request in ended:
            self._leave(request)
        while self._used > self._speed.room and len(self.running) > 1:
            self._preempt(max(self.running, key=lambda s: s.id))
        return ended

    def _grow(self, request: Request, number: int) -> None:
        request.tokens.count += number  # type: ignore[attr-defined]
        request.num_cached = len(request.tokens) - 1
        self._used += number
        self._make_room()

    def _count(self, steps: Steps, number: int) -> None:
        prompts = [Fed(n) for n in steps.counts if n > 1]
        fed = [*prompts, Fed(1)] if len(prompts) < sum(map(bool, steps.counts)) else prompts
        for _ in range(min(number, 8)):
            self._budget.count(fed, steps.seconds, waited=True)  # type: ignore[arg-type]

    def _admit(self, now: float) -> None:
        self.waiting.rank()
        while len(self.running) < self._places and (first := self.waiting.first(now)):
            new = len(first.tokens) - self._holds(first)
            if self.running and self._used + new > self._speed.room:
                break
            self.waiting.discard(first)
            self._enter(first)

    def _holds(self, request: Request) -> int:
        held = self._prefixes.get(request.topic) if request.topic else None
        return min(held[0], request.prompt_length - 1) if held else 0

    def _enter(self, request: Request) -> None:
        """Its shared beginning is read once, and stays until its room is needed."""
        found = self._holds(request)
        request.num_cached = found
        self.read += request.prompt_length
        self.found += found
        if request.topic:
            held = self._prefixes.pop(request.topic, None)
            if held is None:
                held = [request.shared, 0]
                self._used += request.shared
            elif not held[1]:
                self._kept -= held[0]
                self._used += held[0]
            held[1] += 1
            self._prefixes[request.topic] = held
        self._used += len(request.tokens) - request.shared
        self.running.append(request)
        self._make_room()

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._used -= len(request.tokens) - request.shared
        if request.topic:
            held = self._prefixes[request.topic]
            held[1] -= 1
            if not held[1]:
                self._used -= held[0]
                self._kept += held[0]

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.num_cached = 0
        request.preemptions += 1
        self.waiting.add(request)

    def _make_room(self) -> None:
        """Beginnings that nobody uses go, the oldest first."""
        if self._used + self._kept <= self._speed.room:
            return
        for topic, (tokens, users) in list(self._prefixes.items()):
            if not users:
                del self._prefixes[topic]
                self._kept -= tokens
                if self._used + self._kept <= self._speed.room:
                    return
