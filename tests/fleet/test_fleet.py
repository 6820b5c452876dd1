"""The simulation of many replicas: nothing is lost in it, and its shortcuts change nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fleet import replica as replicas
from fleet.__main__ import PAGE, TABLES
from fleet.replica import Replica
from fleet.requests import BLOCK, Request, Traffic
from fleet.routing import Anywhere, ByPrefix, LeastLoaded, Router
from fleet.simulation import Fleet, Rules, Upgrade
from fleet.speed import Speed

from jackfield.replicas.prefixes import ends
from jackfield_plugins.scheduler.fifo import FifoSchedule

SPEED = Speed(
    weight_bytes=69 * 10**9, token_bytes=163_840, token_flops=68 * 10**9, pair_flops=10**6,
    room=400_000, bandwidth=3.4e12, flops=4.9e14, fixed=0.004,
)  # fmt: skip
ROUTERS = [Anywhere, LeastLoaded, ByPrefix]


def run(
    count: int = 6, rate: float = 4.0, seconds: float = 30.0, *, speed: Speed = SPEED,
    router: Router | None = None, rules: Rules | None = None, poison: float = 0.0, places: int = 64,
) -> Fleet:  # fmt: skip
    """A fleet to which requests have come for so long, and which has ended them."""
    made = [Replica(f"r{n}", speed, FifoSchedule(30.0), places) for n in range(count)]
    fleet = Fleet(made, router or LeastLoaded(), rules or Rules())
    traffic = Traffic(rate * count, topics=20 * count, poison=poison)
    fleet.run(traffic.requests(seconds, seed=0), until=seconds + 10_000)
    return fleet


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_ends_once_and_whole(router: type[Router]) -> None:
    fleet = run(router=router())
    numbers = sorted(request.id for request in fleet.over)
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 500
    assert {request.fate for request in fleet.over} == {"done"}
    assert set(fleet.loads.values()) == {0}
    for request in fleet.over:
        assert len(request.tokens) == request.prompt_length + request.wanted
        assert request.came < request.first <= request.ended  # type: ignore[operator]
    for replica in fleet.replicas.values():
        assert (replica.running, len(replica.waiting), replica._used) == ([], 0, 0)
        assert 0 <= replica._kept <= SPEED.room


def test_steps_computed_together_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for keys and values, which grow between them: those count as on average."""
    constant = replace(SPEED, token_bytes=0)
    together = run(rate=1.0, speed=constant)
    monkeypatch.setattr(replicas, "AT_ONCE", 1)
    alone = run(rate=1.0, speed=constant)
    by_number = [sorted(fleet.over, key=lambda r: r.id) for fleet in (together, alone)]
    for one, other in zip(*by_number, strict=True):
        assert one.id == other.id
        assert one.first == pytest.approx(other.first)
        assert one.ended == pytest.approx(other.ended)


def test_a_small_cache_preempts_and_loses_nobody() -> None:
    fleet = run(speed=replace(SPEED, room=6000), count=2, rate=1.0)
    assert {request.fate for request in fleet.over} == {"done"}
    assert any(request.preemptions for request in fleet.over)


def test_a_step_takes_what_it_reads_or_what_it_multiplies() -> None:
    assert SPEED.step(1, 0, 0) == pytest.approx(0.004 + 69e9 / 3.4e12)
    assert SPEED.step(10_000, 0, 0) == pytest.approx(0.004 + 10_000 * 68e9 / 4.9e14)
    one = Request(1, 0, 0, 300, 200, 0.5)
    fleet = Fleet([Replica("r", SPEED, FifoSchedule(30.0), 64)], LeastLoaded(), Rules())
    fleet.run([one], until=100.0)
    steps = one.wanted - 1
    context = one.prompt_length + one.wanted / 2
    each = SPEED.step(1, round(context), 0)
    assert one.ended - one.first == pytest.approx(steps * each, rel=1e-3)  # type: ignore[operator]


def test_shared_beginnings_are_read_once() -> None:
    fleet = run(count=1)
    found = fleet.replicas["r0"].found
    shared = [request for request in fleet.over if request.topic]
    again = len(shared) - len({request.topic for request in shared})
    assert found == sum(r.shared for r in shared) - sum(
        {r.topic: r.shared for r in shared}.values()
    )
    assert again > 20


def test_prefixes_land_together() -> None:
    def share(fleet: Fleet) -> float:
        made = fleet.replicas.values()
        return sum(r.found for r in made) / sum(r.read for r in made)

    assert share(run(router=ByPrefix())) > share(run(router=Anywhere())) + 0.1


@pytest.mark.parametrize("retries", [0, 2])
def test_poison_ends_processes_and_who_had_begun_with_them(retries: int) -> None:
    fleet = run(count=4, poison=0.02, rules=Rules(retries=retries, bad=0, start=5.0))
    fates = {request.fate for request in fleet.over}
    assert fleet.deaths > 2
    assert fates == {"done", "lost"} or fates == {"done", "lost", "refused"}
    assert (fleet.rerouted > 0) == (retries > 0)
    assert all(r.fate != "done" for r in fleet.over if r.poison and r.fate != "refused")
    assert all(r.tries <= retries for r in fleet.over)
    assert fleet.least_up < 4
    assert sorted(r.id for r in fleet.over) == list(range(1, len(fleet.over) + 1))


def upgraded(poison: float = 0.0, drain: float = 1000.0) -> tuple[Fleet, Upgrade]:
    made = [Replica(f"r{n}", SPEED, FifoSchedule(30.0), 64) for n in range(6)]
    fleet = Fleet(made, LeastLoaded(), Rules(bad=1, drain=drain, start=5.0))
    upgrade = Upgrade(fleet, together=2, canaries=1, bake=20.0)
    fleet.at(5.0, upgrade.begin)
    fleet.run(Traffic(12.0, topics=9, poison=poison).requests(300.0, seed=1), until=10_000.0)
    return fleet, upgrade


def test_an_upgrade_that_drains_cuts_nobody_off() -> None:
    fleet, upgrade = upgraded()
    assert {request.fate for request in fleet.over} == {"done"}
    assert {replica.version for replica in fleet.replicas.values()} == {1}
    assert upgrade.ended_at is not None
    assert fleet.least_up >= 4
    hasty, _ = upgraded(drain=0.1)
    assert {request.fate for request in hasty.over} == {"done", "lost"}


def test_a_bad_version_stops_at_its_canaries() -> None:
    fleet, upgrade = upgraded(poison=0.05)
    assert upgrade.stopped_at is not None
    assert {replica.version for replica in fleet.replicas.values()} == {0}
    assert fleet.least_up >= 3


def drained_by(act: str) -> tuple[Fleet, Replica]:
    """A replica that goes back to version 0 while a long answer runs in it; `act` befalls it."""
    replica = Replica("r", SPEED, FifoSchedule(30.0), 64)
    fleet = Fleet([replica], LeastLoaded(), Rules(start=5.0, load_bytes=0.0, drain=20.0))
    fleet.at(0.0, fleet.replace, replica, 1)
    fleet.at(8.0, fleet.replace, replica, 0)  # the first drain, of nobody, was over at once
    if act == "kill":
        fleet.at(9.0, fleet.kill, replica)
    fleet.run([Request(1, 0, 0, 300, 1500, 6.0)], until=200.0)
    return fleet, replica


@pytest.mark.parametrize(("act", "ended"), [("kill", 9.0), ("drain", 28.0)])
def test_what_drains_comes_back_as_what_was_asked_for(act: str, ended: float) -> None:
    fleet, replica = drained_by(act)
    assert (replica.version, fleet.loads) == (0, {"r": 0})
    assert [request.fate for request in fleet.over] == ["lost"]
    restarted = ended + 5.0
    assert fleet.now == pytest.approx(restarted if act == "drain" else 28.0)


def test_the_page_has_a_place_for_every_table() -> None:
    text = PAGE.read_text()
    assert re.findall(r"<!-- (\w+) -->", text) == list(TABLES)
    for name in TABLES:
        table = re.search(f"<!-- {name} -->(.*)<!-- end of {name} -->", text, re.S)
        assert table is not None
        assert table[1].count("\n|") > 4


def test_requests_are_drawn_from_a_seed() -> None:
    def drawn(seed: int) -> list[tuple[int, float, int, int]]:
        made = Traffic(50.0, topics=30).requests(20.0, seed)
        return [(r.topic, r.came, r.prompt_length, r.wanted) for r in made]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(drawn(1)) == pytest.approx(1000, rel=0.15)


def test_what_is_common_is_routed_alike() -> None:
    one, other = Request(1, 7, 400, 100, 5, 0.0), Request(2, 7, 400, 90, 5, 0.0)
    alike = [a == b for a, b in zip(one.blocks, other.blocks, strict=False)]
    assert alike == [end <= 400 for end in ends(490, BLOCK)]
    assert {True, False} == {*alike}
