"""The lives of requests in a loop, followed by hooks: where they come, enter and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackfield.engine.loop import Loop
    from jackfield.engine.sequences import RunningSequence
    from jackfield.tracing.hooks import Hooks
    from jackfield.tracing.lives import Lives

Act = Callable[["RunningSequence"], Any]


def follow(loop: Loop, lives: Lives, hooks: Hooks, clock: Callable[[], int]) -> None:
    """Tell `lives` of the requests of `loop`: those that are there, and all that come."""
    now = clock()
    for runs, sequences in ((True, loop.running), (False, list(loop.waiting))):
        for sequence in (one for one in sequences if one.answer is one):
            for one in (sequence.answer,) if sequence.group is None else sequence.group.outputs:
                lives.here(one, runs=runs, now=now)

    def submit(call: Act) -> Act:
        def traced(sequence: RunningSequence) -> None:
            call(sequence)
            lives.came(sequence)

        return traced

    def enters(call: Act) -> Act:
        def traced(sequence: RunningSequence) -> Any:
            entered = call(sequence)
            if entered:
                lives.entered(sequence, clock())
            return entered

        return traced

    def preempt(call: Act) -> Act:
        def traced(sequence: RunningSequence) -> None:
            call(sequence)
            lives.preempted(sequence, clock())

        return traced

    def release(call: Callable[[Any], None]) -> Callable[[Any], None]:
        def traced(ended: Iterable[RunningSequence]) -> None:
            lives.released([one for sequence in ended for one in sequence.members], clock())
            call(ended)

        return traced

    hooks.wrap(loop, "submit", submit)
    hooks.wrap(loop, "_enters", enters)
    hooks.wrap(loop, "_preempt", preempt)
    hooks.wrap(loop, "_release", release)


def handing_out(
    lives: Lives, clock: Callable[[], int]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What wraps a call behind which requests that left the loop are over."""

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any) -> Any:
            try:
                return call(*args)
            finally:
                lives.over(clock())

        return traced

    return wrap
