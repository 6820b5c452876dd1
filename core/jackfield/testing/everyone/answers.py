"""Checks of what a plan asks a backend: often, quickly, and in any thread."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from jackfield.api import plan
from jackfield.contracts import Requirements
from jackfield.contracts.requirements import FEATURES
from jackfield.errors import error_text
from jackfield.testing.checks import Check, WrongError
from jackfield.testing.everyone.surroundings import kept
from jackfield.testing.models import config_of
from jackfield.testing.subject import Subject

THREADS, ROUNDS = 6, 20
SLOW = 0.3  # seconds of processor time

Answers = dict[str, Any]


def checks(subject: Subject) -> Iterator[Check]:
    """Of `available`, `rank`, `refuse`, `impossible`, `imply` and `notice`."""
    yield Check("everyone.answers", "contract", lambda _: _answers(subject))
    yield Check("everyone.threads", "contract", lambda _: _threads(subject))


@functools.cache
def _jobs() -> tuple[Requirements, ...]:
    """Jobs that differ in what they need."""
    plain = plan(config_of("plain")).requirements
    others: list[dict[str, Any]] = [
        {"dtype": "bfloat16"}, {"dtype": "float64"}, {"device": "cuda"}, {"layout": "packed"},
        {"batch_invariant": True}, {"rollback": True, "forks": True}, {"compiled": True},
        *({"features": {name: "by a check"}} for name in FEATURES),
    ]  # fmt: skip
    return (plain, *(replace(plain, **other) for other in others))


def _asked(subject: Subject, job: Requirements) -> Answers:
    """Everything that a plan asks about one job; an error counts as an answer."""
    backend, options = subject.backend, subject.options
    calls: dict[str, Callable[[], Any]] = {
        "available": backend.available,
        "rank": lambda: backend.rank(job),
        "refuse": lambda: backend.refuse(job, options),
        "impossible": lambda: backend.impossible(job),
        "imply": lambda: backend.imply(job, options),
        "notice": lambda: backend.notice(job),
    }
    return {name: _answer(call) for name, call in calls.items()}


def _answer(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - told as a reason against the backend
        return f"raised {error_text(error)}"


def _answers(subject: Subject) -> str:
    """Each is of its type, the same twice, quick, and changes nothing."""
    slowest = 0.0
    for job in _jobs():
        before = copy.deepcopy(vars(job))
        with kept("asking it"):
            _asked(subject, job)
            begin = time.thread_time()
            first = _asked(subject, job)
            slowest = max(slowest, time.thread_time() - begin)
            second = _asked(subject, job)
        for name, answer in first.items():
            if answer != second[name]:
                raise WrongError(
                    f"{name} answers {answer!r:.80} and then {second[name]!r:.80} to the same job"
                )
        _typed(first)
        if changed := [name for name, value in vars(job).items() if value != before[name]]:
            raise WrongError(f"asking it changed the requirements: {', '.join(changed)}")
    if slowest > SLOW:
        raise WrongError(f"takes {slowest:.1f} s to answer a plan, which asks often")
    return f"{1000 * slowest:.2g} ms a job"


def _typed(answers: Answers) -> None:
    for name in ("available", "refuse", "impossible"):
        said = answers[name]
        if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
            raise WrongError(f"{name} must return a list of reasons, not {said!r:.80}")
    if type(answers["rank"]) not in (int, type(None)):
        raise WrongError(f"rank must return a whole number or None, not {answers['rank']!r:.80}")
    if type(answers["notice"]) not in (str, type(None)):
        raise WrongError(f"notice must return a string or None, not {answers['notice']!r:.80}")
    if not isinstance(answers["imply"], Requirements):
        raise WrongError(f"imply must return Requirements, not {answers['imply']!r:.80}")


def _threads(subject: Subject) -> None:
    """Several threads ask at once about different jobs: each gets the answers as if alone."""
    jobs = _jobs()
    alone = [_asked(subject, job) for job in jobs]
    wrong: list[str] = []
    ready = threading.Barrier(THREADS)

    def ask(number: int) -> None:
        ready.wait()
        for turn in range(ROUNDS):
            at = (turn + number) % len(jobs)
            found = _asked(subject, jobs[at])
            wrong.extend(
                f"{name} answers {found[name]!r:.80} where several threads ask, and "
                f"{alone[at][name]!r:.80} alone"
                for name in found
                if found[name] != alone[at][name]
            )

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if wrong:
        raise WrongError(wrong[0])
