"""The thread that takes the loop's steps, while there is work; requests come from other threads."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch

from jackfield.engine.completions import Delta
from jackfield.engine.health import Health
from jackfield.engine.loop import Loop
from jackfield.engine.report import Report
from jackfield.engine.requests import FORKED, Request, Waker, wake
from jackfield.engine.sequences import RunningSequence
from jackfield.engine.statistics import Statistics
from jackfield.engine.steps import Event
from jackfield.engine.threads import compute_with, give_back_threads
from jackfield.errors import (
    ExecutionError,
    QueueFullError,
    RanksError,
    UsageError,
    error_text,
)
from jackfield.guarded import plugin_call_of
from jackfield.sampling.fenced import request_code_of

logger = logging.getLogger("jackfield.statistics")

LINGER = 0.2  # seconds that an idle thread waits for more on the CPU, so that calls share one
LOG_EVERY = 10.0  # seconds between log lines of statistics


class Worker:
    """Feeds requests to a loop and takes its steps in a thread of its own.

    `deltas` makes what readers see of an event, `mark` what had run before a step. Where a step
    raises, every request fails with the cause, memory is given back, and the next request finds the
    loop empty. Must not refer to the engine, which is collected while this runs.
    """

    def __init__(
        self,
        loop: Loop,
        deltas: Callable[[Event], Delta],
        mark: Callable[[], Report],
        max_waiting: int | None,
        stall_after: float,
        linger: float | None = LINGER,
    ) -> None:
        self._loop = loop
        self._linger = linger
        self._deltas = deltas
        self._mark = mark
        self._max_waiting = max_waiting
        self._stall_after = stall_after
        self._changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._open: dict[int, tuple[RunningSequence, Request]] = {}
        self._coming = 0  # submitted, and not known to the loop yet
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._step_began: float | None = None
        self._failure: str | None = None
        self._lost: str | None = None  # why no step can be computed any more
        self._last_logged = time.monotonic()
        self.closed = False

    def submit(self, pairs: Seq[tuple[RunningSequence, Request]], *, wait: bool) -> None:
        """Hand requests over, all or none.

        Where too many wait already: QueueFullError, or, with `wait`, wait until fewer do.
        """
        self._check_caller("a request cannot be made")
        give_back_threads()
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.closed or self._has_room(len(pairs)))
                self.check_open()
            else:
                self.check_room(len(pairs))
            self._wake()
            self._commands.append(partial(compute_with, torch.get_num_threads()))
            self._open |= {sequence.id: (sequence, request) for sequence, request in pairs}
            self._commands.append(partial(self._enter, [sequence for sequence, _ in pairs]))
            self._coming += len(pairs)

    def _check_caller(self, what: str) -> None:
        """Raise UsageError in a step, and in a forked child."""
        if threading.current_thread() is self._thread:
            raise UsageError(
                f"{what} from inside a step, which would wait for itself; make it before, or let a "
                "thread of its own make it"
            )
        if os.getpid() != self._process:
            raise UsageError(FORKED)

    def _enter(self, sequences: Seq[RunningSequence]) -> None:
        before = self._mark()
        for sequence in sequences:
            sequence.report_before = before
            self._loop.submit(sequence)

    @property
    def _waiting(self) -> int:
        return self._coming + len(self._loop.waiting)

    def _has_room(self, count: int) -> bool:
        """Whether `count` more may wait; more than the bound by themselves when nobody does."""
        most = self._max_waiting
        return most is None or self._waiting + count <= most or self._waiting == 0

    def cancel(self, request: Request) -> None:
        """End a request before the next step. Nothing happens to one that has ended."""
        with self._changed:
            if request.id in self._open and os.getpid() == self._process:
                self._wake()
                self._commands.append(lambda: self._cancel(request.id))

    def _cancel(self, number: int) -> None:
        if number in self._open:
            sequence, _ = self._open[number]
            self._deliver(self._loop.cancel(sequence))

    def while_idle(self, act: Callable[[], None]) -> None:
        """Do what no request may see happen. Raises UsageError while one is open."""
        with self._changed:
            self.check_open()
            # The last step tells its readers before it has ended.
            self._changed.wait_for(lambda: bool(self._open) or self._step_began is None)
            if self._open:
                raise UsageError(
                    f"{len(self._open)} requests are open, which began without this; wait until "
                    "they have ended, or cancel them"
                )
            self._loop.turns += 1  # what `act` changes is observed anew
            try:
                act()
            finally:
                give_back_threads()  # of what it computed: this may be another thread than submits

    def between_steps(self, act: Callable[[], None]) -> None:
        """Have the thread do `act` between two steps, and wait until it has.

        Raises what `act` raises; UsageError from inside a step, and where no step comes any more.
        """
        self._check_caller("this cannot be done")
        done: list[BaseException | None] = []

        def command() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - the caller's, and no request's
                done.append(error)
            else:
                done.append(None)

        with self._changed:
            while not done:  # where a step fails, what waits for the next one is lost
                self.check_open()
                self._wake()
                self._commands.append(command)
                self._changed.wait_for(
                    lambda: bool(done) or self.closed or command not in self._commands
                )
        if done[0] is not None:
            raise done[0]

    def _wake(self) -> None:
        """See that a thread is there. What it is to do may follow, as long as the lock is held."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="jackfield", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise ExecutionError(f"no thread can be started for the engine: {error}") from error
            self._thread = thread
        self._changed.notify_all()

    def _run(self) -> None:
        while self._next():
            self._step_began = time.monotonic()
            try:
                if self._loop.running or self._loop.waiting:
                    self._deliver(self._loop.step())  # no name here: an idle thread would keep it
                    self._failure = None
            except BaseException as error:  # noqa: BLE001 - a waiter must never wait for ever
                self._fail(error)
            finally:
                self._step_began = None
            self._log()

    def _next(self) -> bool:
        """Do what was asked for since the last step; False when the thread is to end."""
        with self._changed:
            self._changed.notify_all()  # the last step has ended
            busy = self._loop.running or self._loop.waiting
            if not (busy or self._commands or self.closed):
                self._fail_forgotten()
                self._changed.wait_for(lambda: self._commands or self.closed, self._linger)
            commands, self._commands = self._commands, []
            if self.closed or not (busy or commands):
                self._thread = None
                self._changed.notify_all()
                return False
            self._coming = 0
            try:
                for command in commands:
                    command()
            except BaseException as error:  # noqa: BLE001 - as in `_run`
                self._fail(error)
            self._changed.notify_all()
        return True

    def _deliver(self, events: Seq[Event]) -> None:
        """Hand out what a step made. Readers are woken once for all of it, also if some fails."""
        readers: list[Waker] = []
        try:
            for event in events:
                number = event.sequence.id
                if (entry := self._open.get(number)) is None:
                    continue
                request = entry[1]
                if not (request.streams or event.sequence.finish_reason):
                    continue  # nobody reads along
                delta = self._deltas(event)
                if delta.completion is not None:
                    del self._open[number]
                readers += request.deliver(delta)
        finally:
            wake(readers)

    def _fail(self, error: BaseException) -> None:
        """Every request fails with the cause; nothing is left of them."""
        self._failure = error_text(error)
        if isinstance(error, RanksError):
            self._end_with(error)
        self._fail_all(error)
        try:
            self._loop.reset()
        except BaseException as again:  # noqa: BLE001 - requests that come after it must not hang
            logger.error("giving memory back failed too: %s", error_text(again))

    def _end_with(self, error: RanksError) -> None:
        """Take no requests any more: no step can be computed."""
        with self._changed:
            self._lost, self.closed = str(error), True
            self._changed.notify_all()

    def _fail_forgotten(self) -> None:
        """Nothing is left to do: a request that is open all the same would wait for ever."""
        for _, request in self._open.values():
            why = "the loop has nothing to do and never ended this request; please report it"
            wake(request.fail(ExecutionError(why)))
        self._open = {}

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            failed, self._open = list(self._open.values()), {}
            self._commands, self._coming = [], 0  # else those would run with nobody to read them
        wake(waker for _, request in failed for waker in request.fail(error))

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._last_logged >= LOG_EVERY and logger.isEnabledFor(logging.INFO):
            self._last_logged = now
            try:
                logger.info("%s", self.statistics())
            except Exception as error:  # noqa: BLE001 - of a cache; the thread must not end of it
                logger.warning("no statistics: %s", error_text(error))

    def statistics(self) -> Statistics:
        loop, metrics = self._loop, self._loop.metrics
        first, later = metrics.times()
        return Statistics(
            running=len(loop.running),
            waiting=self._waiting,
            steps=loop.steps,
            finished=dict(metrics.finished),
            tokens_in=metrics.tokens_in,
            tokens_computed=metrics.tokens_computed,
            tokens_out=metrics.tokens_out,
            preemptions=metrics.preemptions,
            time_to_first_token=first,
            time_per_token=later,
            cache=loop.cache.usage(),
            speculation=loop.decoding.speculation(),
        )

    def health(self) -> Health:
        began = self._step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        stalled = seconds > self._stall_after
        with self._changed:
            room, thread = self._has_room(1), self._thread
        return Health(
            alive=not self.closed,
            ready=not self.closed and not stalled and room,
            stalled=stalled,
            step_seconds=seconds,
            failure=self._failure,
            inside=self._doing(thread),
        )

    def close(self, timeout: float) -> str | None:
        """Fail what is open, wait until the thread has ended, give memory back.

        Returns what a step hangs in that has not ended within `timeout` seconds; its thread is left
        behind, and takes no other step.
        """
        with self._changed:
            self.closed, thread = True, self._thread
            self._changed.notify_all()
        self._fail_all(_closed())
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                return self._doing(thread) or "a step"
        self._loop.reset()
        return None

    def _doing(self, thread: threading.Thread | None) -> str | None:
        """What the step is inside of: code of a plugin or a request, or else the model."""
        if thread is None:
            return None
        return request_code_of(thread.ident) or plugin_call_of(thread.ident) or self._loop.doing

    def check_room(self, count: int = 1) -> None:
        """Raise QueueFullError where too many wait for `count` more; else as `check_open`."""
        self.check_open()
        if not self._has_room(count):
            raise QueueFullError(
                f"{self._waiting} requests wait already, and max_waiting={self._max_waiting}; try "
                "again later, or load with a larger max_waiting"
            )

    def check_open(self) -> None:
        if self._lost is not None:
            raise RanksError(self._lost)
        if self.closed:
            raise _closed()


def linger_on(device: str) -> float | None:
    """How long an idle thread is kept for a model on `device`; None: until the engine is closed.

    Libraries of GPUs keep handles and plans for each thread (cuBLAS, cuDNN), so that a new one is
    slow at first. On the CPU an idle engine holds no thread.
    """
    return LINGER if device == "cpu" else None


def _closed() -> UsageError:
    return UsageError("the engine is closed; load the model again")
