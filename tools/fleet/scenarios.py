"""What is asked of the simulation, and the tables that come of it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fleet.replica import Replica
from fleet.requests import Request, Traffic
from fleet.routing import Anywhere, ByPrefix, LeastLoaded, Router
from fleet.simulation import Fleet, Rules, Upgrade
from fleet.speed import Speed
from jackfield_plugins.scheduler.fifo import FifoSchedule

Row = list[str]
PLACES = 64
STORAGE = 1e8  # bytes a second for each replica that there is
ROUTERS: dict[str, Callable[[], Router]] = {
    "at random": Anywhere, "fewest open requests": LeastLoaded, "jackfield's": ByPrefix,
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """How large and how long everything is."""

    replicas: int = 100
    cell: int = 40  # replicas that are upgraded
    all_replicas: int = 2000
    seconds: float = 90.0


def fleet_of(speed: Speed, count: int, router: Router, rules: Rules | None = None) -> Fleet:
    """That many replicas with `fifo`, as `serve` has it."""
    made = (Replica(f"r{n}", speed, FifoSchedule(30.0), PLACES) for n in range(count))
    return Fleet(made, router, rules or Rules())


def rules_for(speed: Speed, count: int, **more: Any) -> Rules:
    """Weights of two devices, from storage that is as fast as there are replicas."""
    return Rules(load_bytes=2 * speed.weight_bytes, storage=STORAGE * count, **more)


def traffic(rate: float, replicas: int, poison: float = 0.0) -> Traffic:
    """So many requests a second and replica, on twenty common beginnings a replica."""
    return Traffic(rate * replicas, topics=20 * replicas, poison=poison)


def load(speed: Speed, scale: Scale) -> tuple[Row, Iterator[Row]]:
    """What each way of routing bears."""
    head = ["requests/s a replica", "routing", "first token, median", "99 %", "each token, 99 %",
            "of prompts found", "tokens/s a replica"]  # fmt: skip

    def rows() -> Iterator[Row]:
        for rate in (3.0, 5.0, 6.0, 7.0):
            for name, router in ROUTERS.items():
                yield [f"{rate:g}", name, *_at(speed, scale.replicas, rate, router(), scale)]
        name = f"jackfield's, {scale.all_replicas:,} replicas"
        found = _at(speed, scale.all_replicas, 5.0, ByPrefix(), replace(scale, seconds=45.0))
        yield ["5", name, *found]

    return head, rows()


def _at(speed: Speed, count: int, rate: float, router: Router, scale: Scale) -> Row:
    fleet = fleet_of(speed, count, router)
    fleet.run(traffic(rate, count).requests(scale.seconds, seed=1), scale.seconds)
    late = [r for r in fleet.over if r.came > scale.seconds / 3]
    ended = [r for r in fleet.over if (r.ended or 0.0) > scale.seconds / 3]
    made = sum(r.wanted for r in ended) / (scale.seconds * 2 / 3) / count
    read = sum(r.read for r in fleet.replicas.values())
    found = sum(r.found for r in fleet.replicas.values())
    firsts = [r.first - r.came for r in late if r.first is not None]
    return [_time(_part(firsts, 0.5)), _time(_part(firsts, 0.99)), _time(_part(_each(late), 0.99)),
            f"{found / read:.0%}", f"{made:,.0f}"]  # fmt: skip


def upgrades(speed: Speed, scale: Scale) -> tuple[Row, Iterator[Row]]:
    """One version after the other, more or fewer replicas at a time."""
    head = ["replaced at once", "drain", "takes", "first token, 99 %", "requests cut off"]

    def rows() -> Iterator[Row]:
        for together, drain in ((4, 60.0), (8, 60.0), (12, 60.0), (8, 5.0)):
            yield [f"{together / scale.cell:.0%}", _time(drain),
                   *_upgraded(speed, scale.cell, together, drain)]  # fmt: skip

    return head, rows()


def _upgraded(speed: Speed, count: int, together: int, drain: float) -> Row:
    fleet = fleet_of(speed, count, ByPrefix(), rules_for(speed, count, drain=drain))
    upgrade = Upgrade(fleet, together=together, canaries=0, bake=0.0)
    fleet.at(30.0, upgrade.begin)
    coming = traffic(5.0, count).requests(math.inf, seed=2)
    fleet.run(itertools.takewhile(lambda _: upgrade.ended_at is None, coming), math.inf)
    assert upgrade.ended_at is not None
    during = [r for r in fleet.over if r.came > 30]
    takes = f"{(upgrade.ended_at - 30) / 60:.1f} min"
    return [takes, _time(_part(_firsts(during), 0.99)), _share(during, "lost")]


def poison(speed: Speed, scale: Scale) -> tuple[Row, Iterator[Row]]:
    """A kernel that ends its process with one prompt of thousands."""
    head = ["it ends the process with one prompt of", "how it came", "retries",
            "processes that died", "fewest that ran", "cut off or refused"]  # fmt: skip

    def rows() -> Iterator[Row]:
        for one_of, retries in ((10_000, 0), (10_000, 1), (10_000, 3), (1000, 1)):
            found = _poisoned(speed, scale, 1 / one_of, retries)
            yield [f"{one_of:,}", "everywhere at once", f"{retries}", *found]
        for one_of, minutes in ((1000, 2), (10_000, 20)):
            found = _poisoned(speed, scale, 1 / one_of, 1, minutes)
            yield [f"{one_of:,}", f"5 first, for {minutes} minutes", "1", *found]

    return head, rows()


def _poisoned(
    speed: Speed, scale: Scale, share: float, retries: int, minutes: int | None = None
) -> Row:
    """Three minutes of it, and before them those of the first five, where `minutes` are said."""
    rules = rules_for(speed, scale.replicas, retries=retries, bad=1)
    fleet = fleet_of(speed, scale.replicas, ByPrefix(), rules)
    if minutes is None:
        for replica in fleet.replicas.values():
            replica.version = 1
    else:
        upgrade = Upgrade(fleet, together=10, canaries=5, bake=60.0 * minutes, bearable=1)
        fleet.at(0.0, upgrade.begin)
    seconds = 180.0 + 60.0 * (minutes or 0)
    fleet.run(traffic(5.0, scale.replicas, poison=share).requests(seconds, seed=3), seconds)
    gone = sum(r.fate in ("lost", "refused") for r in fleet.over) / len(fleet.over)
    return [f"{fleet.deaths}", f"{fleet.least_up / scale.replicas:.0%}", f"{gone:.3%}"]


def routing_cost(speed: Speed, scale: Scale) -> tuple[Row, Iterator[Row]]:
    """What one decision costs the process that all requests go through, on this machine."""
    head = ["replicas", "a decision", "decisions/s on one core"]

    def rows() -> Iterator[Row]:
        for count in (2, 20, 200, 2000):
            coming = list(traffic(2000 / count, count).requests(2.0, seed=4))
            router, loads = ByPrefix(), {f"r{n}": n % 40 for n in range(count)}
            begin = time.process_time()
            for request in coming:
                router.choose(request, loads)
            each = (time.process_time() - begin) / len(coming)
            yield [f"{count:,}", f"{1e6 * each:,.0f} µs", f"{1 / each:,.0f}"]

    return head, rows()


def _firsts(requests: list[Request]) -> list[float]:
    return [r.first - r.came for r in requests if r.first is not None]


def _each(requests: list[Request]) -> list[float]:
    """Seconds a token, of those that got several."""
    return [
        (r.ended - r.first) / (r.wanted - 1)
        for r in requests
        if r.ended is not None and r.first is not None and r.wanted > 1
    ]


def _part(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else math.nan


def _share(requests: list[Request], fate: str) -> str:
    return f"{sum(r.fate == fate for r in requests) / max(1, len(requests)):.2%}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
