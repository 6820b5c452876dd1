"""Checks of a compiler in two threads at once: each engine has one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from jackfield.testing.checks import Check
from jackfield.testing.compiler.steps import (
    LIMIT,
    Compiled,
    exact,
    inputs,
    main_dtype,
    nearly,
    tried,
)
from jackfield.testing.subject import Subject
from jackfield.testing.threads import in_threads

if TYPE_CHECKING:
    import torch

STEPS = 120  # of each thread: that they meet in the middle of one is a matter of chance
INPUTS = 4


def checks(subject: Subject) -> Iterator[Check]:
    """All of them."""
    yield Check("step.threads", "contract", partial(tried, subject)(_together), limit=LIMIT)


def _together(subject: Subject, _: object) -> str:
    """Two models' steps of one shape, each in its thread, from the first, which compiles."""
    dtype = main_dtype(subject)
    both = [Compiled(subject, dtype, seed) for seed in (1, 2)]
    size = both[0].compilation.fill(2)
    given = [
        [inputs((size, 1, None), 10 * who + number, subject.device) for number in range(INPUTS)]
        for who in range(2)
    ]
    logits = [
        [[exact(compiled.model, one) for one in given[whose]] for whose in range(2)]
        for compiled in both
    ]

    def run(who: int) -> None:
        for number in range(STEPS):
            now = number % INPUTS
            found: Any = both[who](*given[who][now])
            what = f"two engines in two threads at once, step {number} of one of them"
            usual = partial(_others, found, logits[who], logits[1 - who], who)
            both[who].hold(found, logits[who][who][now], what, usual)

    in_threads([partial(run, 0), partial(run, 1)], "two engines in two threads at once", LIMIT)
    return f"{STEPS} steps each"


def _others(found: torch.Tensor, mine: Any, theirs: Any, who: int, bound: float) -> str:
    """Whose the logits are, where they are the other's; `mine` are those of model `who`."""
    for words, known in (
        ("they are those of the other engine's model", theirs[1 - who] + theirs[who]),
        ("they are those of the other engine's ids and positions", mine[1 - who]),
        ("they are those of another step", mine[who]),
    ):
        if any(nearly(found, one, bound) for one in known):
            return f": {words}"
    return ""
