"""Checks in simulated traffic: nobody waits for ever, and nothing is kept of who has ended."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

from jackfield.engine.checked_schedule import FOR_EVER
from jackfield.testing.checks import Check, WrongError
from jackfield.testing.lent import Lent
from jackfield.testing.memory import growth, quick_collection
from jackfield.testing.scheduler.simulation import Simulated, bind
from jackfield.testing.subject import Subject

#: Who waits, and who comes later and again and again: what a scheduler may go by.
FLOODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the first of equal ones": ({}, {}),
    "a long prompt among short ones": ({"prompt": 200}, {"prompt": 2}),
    "a short prompt among long ones": ({"prompt": 1}, {"prompt": 30}),
    "a long text among short ones": ({"new": 50}, {"new": 1}),
    "a short text among long ones": ({"new": 1}, {"new": 6}),
    "one without a deadline": ({}, {"deadline": 30.0}),
    "one with a late deadline": ({"deadline": 900.0}, {"deadline": 1.0}),
    "one of another cache_salt": ({"cache_salt": "other"}, {"cache_salt": "same"}),
    "a sample": ({"sampled": True}, {}),
    "a preempted one": ({"preempted": True}, {}),
    "one of a higher priority": ({"priority": 2}, {}),
}


def checks(subject: Subject) -> Iterator[Check]:
    """Bounds on waiting, determinism, and memory."""
    every: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "traffic.ends": (_ends, (1, 3, 12, 60)),
        "traffic.repeatable": (_repeatable, (3, 30)),
        "traffic.waiting": (_waiting, tuple(FLOODS)),
        "traffic.prompts": (_prompts, tuple(_SIZES)),
        "traffic.two_engines": (_two_engines, (2, 12)),
        "traffic.forgets": (_forgets, ("",)),
        "traffic.keeps": (_keeps, ("",)),
    }
    for name, (run, cases) in every.items():
        yield Check(name, "contract", functools.partial(run, subject), cases)


def _requests(subject: Subject, count: int) -> list[dict[str, Any]]:
    numbers = subject.random(f"requests {count}")
    return [
        {
            "prompt": numbers.choice((1, 3, 20, 90)),
            "new": numbers.choice((1, 2, 9)),
            "priority": numbers.choice((0, 0, 0, 1)),
        }
        for _ in range(count)
    ]


def _traffic(subject: Subject, count: int) -> Simulated:
    """Requests that come by and by, three places, some preempted, until all have ended."""
    numbers = subject.random(f"traffic {count}")
    loop = Simulated(bind(subject), places=3, budget=16, chunk=8, watches=count < 20)
    coming = _requests(subject, count)
    work = sum(3 * (r["prompt"] + r["new"]) for r in coming) + 10 * count
    while coming or loop.waiting or loop.running:
        if coming and (numbers.random() < 0.4 or not (loop.waiting or loop.running)):
            loop.submit(**coming.pop())
        loop.step()
        if loop.running and numbers.random() < 0.02:
            loop.preempt(loop.running[-1])
        if loop.steps > work:
            left = [s.id for s in (*loop.waiting, *loop.running)]
            raise WrongError(
                f"of {count} requests {len(left)} have not ended after {loop.steps} steps: "
                f"{left[:9]}"
            )
    return loop


def _ends(subject: Subject, count: int) -> str:
    return f"{count} requests in {_traffic(subject, count).steps} steps"


def _repeatable(subject: Subject, count: int) -> None:
    """The same requests twice."""
    one, other = _traffic(subject, count), _traffic(subject, count)
    if (a := [s.id for s in one.ended]) != (b := [s.id for s in other.ended]):
        raise WrongError(f"the same requests end in another order the second time: {b} after {a}")


def _waiting(subject: Subject, case: str) -> str:
    """One waits, and later ones that differ from it in one thing come without an end."""
    own, others = FLOODS[case]
    own = dict(own)
    loop = Simulated(bind(subject), places=2, budget=300)
    for _ in range(4):
        loop.submit(**others)
    loop.step()
    sampled, preempted = own.pop("sampled", False), own.pop("preempted", False)
    victim = loop.submit(**own)
    loop.steps += 1  # the others come later
    if sampled:
        victim.sample = 3
    if preempted:
        victim.preemptions = 3
    return _waits(loop, victim, others, case)


def _waits(loop: Simulated, victim: Lent, others: dict[str, Any], case: str) -> str:
    while victim in loop.waiting or victim in loop.running:
        while len(loop.waiting) < 5:
            loop.submit(**others)
        loop.step()
        if why := loop.starved(victim):
            raise WrongError(f"starves a request ({case}): it {why}")
        del loop.entered[:-9], loop.ended[:-9]
        if loop.steps > 6 * FOR_EVER:
            raise WrongError(
                f"starves a request ({case}): it has not ended after {loop.steps} steps"
            )
    return f"{case}: ended after {loop.now - victim.arrival:.0f} s"


#: Places and tokens of a loop, and who else is there. A text of 10⁵ tokens decodes all the while.
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "budget for one": ({"places": 4, "budget": 5}, {"prompt": 30, "new": 4}),
    "a small budget": ({"places": 4, "budget": 12}, {"prompt": 30, "new": 4}),
    "small chunks": ({"places": 4, "budget": 30, "chunk": 8}, {"prompt": 30, "new": 4}),
    "beside others that decode": ({"places": 4, "budget": 30}, {"prompt": 1, "new": 100_000}),
}


def _prompts(subject: Subject, case: str) -> str:
    """A long prompt is read while others come, are read and decode."""
    sizes, others = _SIZES[case]
    loop = Simulated(bind(subject), **sizes)
    first = [loop.submit(**others) for _ in range(2)] if others["prompt"] == 1 else []
    victim = loop.submit(prompt=400, new=3)
    loop.step()
    found = _waits(loop, victim, others, f"a long prompt, {case}")
    assert not any(sequence in loop.ended for sequence in first)
    return found


def _two_engines(subject: Subject, count: int) -> None:
    """Two engines have requests of the same numbers."""
    alone = _traffic(subject, count)
    one, other = (Simulated(bind(subject), places=3, budget=16, chunk=8) for _ in range(2))
    numbers = subject.random(f"traffic {count}")
    coming = _requests(subject, count)
    while coming or one.waiting or one.running:
        if coming and (numbers.random() < 0.4 or not (one.waiting or one.running)):
            one.submit(**coming.pop())
        other.submit(prompt=50, new=2, priority=1)
        other.step()
        one.step()
        if one.running and numbers.random() < 0.02:
            one.preempt(one.running[-1])
        if one.steps > 20 * alone.steps + 100:
            break
    if [s.id for s in one.ended] != [s.id for s in alone.ended]:
        raise WrongError(
            "another engine's requests of the same numbers change who goes first; keep what is "
            "kept in the bound schedule"
        )


def _forgets(subject: Subject, _: object) -> str:
    """Requests come and end for ever: memory must not grow with them."""
    loop = Simulated(bind(subject), places=3, budget=64)

    def requests() -> None:
        for _ in range(100):
            loop.submit(prompt=3, new=1)
            loop.step()
        while loop.waiting or loop.running:
            loop.step()
        loop.ended.clear()
        loop.entered.clear()

    each = growth(requests, 40 * 100) / 100
    if each > 40:
        raise WrongError(f"keeps {each:.0f} bytes of each request that has ended: memory grows")
    return f"{max(0.0, each):.0f} bytes a request stay"


def _keeps(subject: Subject, _: object) -> None:
    """Those that have ended long ago can be collected."""
    loop = Simulated(bind(subject), places=3, budget=64)
    with quick_collection():
        kept = [weakref.ref(loop.submit(prompt=3, new=2)) for _ in range(20)]
        for _ in range(60):
            loop.submit(prompt=3, new=1)
            loop.step()
        loop.ended.clear()
        gc.collect()
        left = sum(reference() is not None for reference in kept)
    if left > 3:
        raise WrongError(f"keeps {left} of 20 sequences that have ended, with all of their tokens")
