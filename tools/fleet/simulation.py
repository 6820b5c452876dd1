"""Replicas, requests, failures and upgrades on one clock that nobody waits for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fleet.replica import Replica, Steps
from fleet.requests import Request
from fleet.routing import Router


@dataclass(frozen=True)
class Rules:
    """What operators have decided, in seconds and bytes a second.

    A request that got no token is sent on `retries` times when its replica ends. A replica takes
    `start` to begin and then reads `load_bytes`; all that read at one time share `storage`.
    `bad` is the version whose kernel poison ends.
    """

    retries: int = 1
    start: float = 40.0
    load_bytes: float = 141e9
    storage: float = 200e9
    drain: float = 60.0
    bad: int | None = None


class Fleet:
    """Runs requests through replicas to their end. `deaths` counts processes that poison ended."""

    def __init__(self, replicas: Iterable[Replica], router: Router, rules: Rules) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.loads = dict.fromkeys(self.replicas, 0)  # of those that take requests
        self.now = 0.0
        self.deaths = self.rerouted = 0
        self.down: set[str] = set()
        self.least_up = len(self.replicas)
        self.over: list[Request] = []
        self._open: dict[int, str] = {}
        self._router, self._rules = router, rules
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._loading = 0
        self._draining: dict[str, tuple[int, float]] = {}  # its next version, since when

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        """Do it then."""
        heapq.heappush(self._events, (time, next(self._numbers), act, args))

    def run(self, requests: Iterable[Request], until: float) -> None:
        """Let requests come, and everything happen until then."""
        coming = iter(requests)
        request = next(coming, None)
        while True:
            event = self._events[0][0] if self._events else until
            if request is not None and request.came <= min(event, until):
                self.now = request.came
                self.send(request)
                request = next(coming, None)
                continue
            if event >= until:
                return
            self.now, _, act, args = heapq.heappop(self._events)
            act(*args)

    def send(self, request: Request) -> None:
        """Give it to the replica that the router chooses."""
        if not self.loads:
            self._end(request, "refused")
            return
        name = self._router.choose(request, self.loads)
        self.loads[name] += 1
        self._open[request.id] = name
        replica = self.replicas[name]
        replica.add(request)
        if replica.steps is None:
            self._go_on(replica)
        elif replica.steps.number > 1:  # it need not wait for all of these
            self._cut(replica, replica.steps)

    def _cut(self, replica: Replica, steps: Steps) -> None:
        number = steps.whole_by(self.now)
        if number < steps.number:
            replica.steps = Steps(steps.begin, steps.seconds, number, steps.counts)
            self.at(replica.steps.end, self._step_over, replica, replica.steps)

    def _go_on(self, replica: Replica) -> None:
        end = replica.begin(self.now)
        if end is not None:
            self.at(end, self._step_over, replica, replica.steps)
        else:
            self._drained(replica)

    def _step_over(self, replica: Replica, steps: Steps) -> None:
        if replica.steps is not steps:
            return
        if replica.version == self._rules.bad and _poisoned(replica, steps):
            self.deaths += 1
            self.kill(replica)
            return
        for request in replica.finish(self.now):
            self._end(request, request.fate)
        self._go_on(replica)

    def _end(self, request: Request, fate: str) -> None:
        name = self._open.pop(request.id, None)
        if name in self.loads:
            self.loads[name] -= 1
        request.fate = fate
        self.over.append(request)

    def kill(self, replica: Replica) -> None:
        """Its process ends: who got no token goes elsewhere, the others are lost."""
        self._out(replica.name)
        self._lose(replica)
        version, _ = self._draining.pop(replica.name, (replica.version, 0.0))
        self._restart(replica, version)

    def _lose(self, replica: Replica) -> None:
        had = [*replica.running, *replica.waiting]
        replica.clear()
        for request in had:
            if request.first is None and request.tries < self._rules.retries:
                self._open.pop(request.id)
                self.rerouted += 1
                request.again(self.now)
                self.send(request)
            else:
                self._end(request, "lost")

    def _out(self, name: str) -> None:
        self.loads.pop(name, None)
        self.down.add(name)
        self.least_up = min(self.least_up, len(self.loads))

    def _restart(self, replica: Replica, version: int) -> None:
        self._loading += 1
        reading = self._rules.load_bytes * self._loading / self._rules.storage
        self.at(self.now + self._rules.start + reading, self._up, replica, version)

    def _up(self, replica: Replica, version: int) -> None:
        self._loading -= 1
        replica.version = version
        self.down.discard(replica.name)
        self.loads[replica.name] = 0

    def replace(self, replica: Replica, version: int) -> None:
        """It takes no more, ends what it has (within the drain), and comes back as `version`."""
        self._out(replica.name)
        self._draining[replica.name] = (version, self.now)
        if replica.running or replica.waiting:
            self.at(self.now + self._rules.drain, self._late, replica, self.now)
        else:
            self._drained(replica)

    def _late(self, replica: Replica, since: float) -> None:
        """Whoever still runs in what drains since then is cut off."""
        if self._draining.get(replica.name, (0, -1.0))[1] == since:
            self._drained(replica)

    def _drained(self, replica: Replica) -> None:
        """It has nobody, or those it has may go on no longer: it starts anew, if that is wanted."""
        if replica.name in self._draining:
            version, _ = self._draining.pop(replica.name)
            self._lose(replica)
            self._restart(replica, version)


def _poisoned(replica: Replica, steps: Steps) -> bool:
    """Whether one of the prompts that end with this step ends the process."""
    return any(
        request.poison and count and request.num_cached + count >= request.prompt_length
        for request, count in zip(replica.running, steps.counts, strict=True)
    )


class Upgrade:
    """From one version to the next: `canaries` first, for `bake` seconds, then `together` at once.

    Where more than `bearable` processes die while it goes on, it stops, and what was replaced goes
    back.
    """

    def __init__(
        self, fleet: Fleet, *, together: int, canaries: int, bake: float, bearable: int = 2
    ) -> None:
        self._fleet, self._together, self._bearable = fleet, together, bearable
        self._left = list(fleet.replicas.values())
        self._under_way: list[Replica] = []
        self._done: list[Replica] = []
        self._canaries, self._bake = canaries, bake
        self._deaths = fleet.deaths
        self.stopped_at: float | None = None
        self.ended_at: float | None = None

    def begin(self) -> None:
        first, self._left = self._left[: self._canaries], self._left[self._canaries :]
        self._take(first)
        self._fleet.at(self._fleet.now + self._bake, self._look)

    def _take(self, replicas: list[Replica]) -> None:
        for replica in replicas:
            self._fleet.replace(replica, 1)
        self._under_way += replicas

    def _look(self) -> None:
        """Every second once the canaries have baked: who is back, and who is next."""
        fleet = self._fleet
        if fleet.deaths - self._deaths > self._bearable:
            self.stopped_at = fleet.now
            self._back([*self._done, *self._under_way])
            return
        back = [r for r in self._under_way if r.name not in fleet.down]
        self._done += back
        self._under_way = [r for r in self._under_way if r.name in fleet.down]
        room = self._together - len(self._under_way)
        self._take(self._left[:room])
        self._left = self._left[room:] if room > 0 else self._left
        if not self._left and not self._under_way:
            self.ended_at = fleet.now
            return
        fleet.at(fleet.now + 1.0, self._look)

    def _back(self, replaced: list[Replica]) -> None:
        """Every second, until all have the version that was."""
        fleet = self._fleet
        up = [replica for replica in replaced if replica.name not in fleet.down]
        for replica in up:
            if replica.version:
                fleet.replace(replica, 0)
        left = [replica for replica in replaced if replica.version or replica.name in fleet.down]
        if left:
            fleet.at(fleet.now + 1.0, self._back, left)
