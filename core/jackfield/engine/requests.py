"""A request as its reader sees it: wait for it, iterate over it, cancel it, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any, NoReturn

from jackfield.engine.completions import Completion, Delta
from jackfield.errors import ExecutionError, JackfieldError, UsageError, error_text

BACKLOG = 64  # deltas that are kept apart; a reader who is further behind gets them as one

FORKED = "an engine does not survive a fork; load one in the child process"


class Waker:
    """Somebody who waits in an event loop; before `not_before` they are woken for an end only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.woken = asyncio.Event()
        self.not_before = 0.0  # on the clock `time.monotonic`

    async def wait(self, rest: float = 0.0) -> None:
        """Wait until it is woken, or `rest` seconds are over, in which what came is not told."""
        if not rest:
            await self.woken.wait()
            return
        self.not_before = time.monotonic() + rest
        timer = self.loop.call_later(rest, self.woken.set)
        try:
            await self.woken.wait()
        finally:
            self.not_before = 0.0
            timer.cancel()


class Request:
    """A request that was submitted.

    Iterate over it (``for`` or ``async for``) for its deltas, each of which is handed out once; or
    call `result`, or ``await`` it, for its completion. Nothing of this cancels it: `cancel` does.
    """

    def __init__(
        self, number: int, cancel: Callable[[Request], None], *, streams: bool, engine: Any = None
    ) -> None:
        self.id = number
        self._engine = engine  # is not collected while the request is open
        self._cancel = cancel
        self.streams = streams
        self._process = os.getpid()
        lock = threading.RLock()
        self._changed, self._end = threading.Condition(lock), threading.Condition(lock)
        self._deltas: deque[Delta] = deque()
        self._completion: Completion | None = None
        self._failure: BaseException | None = None
        self._wakers: list[Waker] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._completion is not None or self._failure is not None

    def cancel(self) -> None:
        """End it, wherever it is; its completion has what there was. A second call does nothing."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion, `timeout` seconds at most.

        Raises TimeoutError, or what made the engine fail; UsageError in a forked child.
        """
        self._check_process()
        with self._changed:
            if not self._end.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.id} has not ended within {timeout} s")
        if self._completion is None:
            raise self._error()
        return self._completion

    def __iter__(self) -> Iterator[Delta]:
        while True:
            self._check_process()
            with self._changed:
                self._changed.wait_for(lambda: self._deltas or self.done)
                delta = self._next()
            if delta is None:
                return
            yield delta
            if delta.completion is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self._read(self._next, 0.0):
            yield delta

    async def paced(self, interval: float, *, merged: bool) -> AsyncIterator[Delta]:
        """``async for`` where waking the reader costs much: once in `interval` seconds at most.

        The first delta and the end come at once. With `merged` all that has come meanwhile is
        handed out as one delta.
        """
        async for delta in self._read(self._all_that_came if merged else self._next, interval):
            yield delta

    async def _read(
        self, take: Callable[[], Delta | None], interval: float
    ) -> AsyncIterator[Delta]:
        rest = 0.0  # nothing has been handed out yet
        with self._awoken() as waker:
            while True:
                waker.woken.clear()
                ended = self.done  # looked at first: what comes before it has ended is taken
                if (delta := take()) is not None:
                    yield delta
                    if delta.completion is not None:
                        return
                    rest = interval
                elif ended:
                    return
                else:
                    await waker.wait(rest)
                    rest = 0.0

    def __await__(self) -> Generator[Any, None, Completion]:
        yield from self._ended().__await__()
        return self.result()

    async def _ended(self) -> None:
        with self._awoken() as waker:
            while not self.done:
                await waker.wait()
                waker.woken.clear()

    @contextlib.contextmanager
    def _awoken(self) -> Iterator[Waker]:
        """What is set in the running event loop with each delta, and at the end."""
        self._check_process()
        waker = Waker(asyncio.get_running_loop())
        with self._changed:
            self._wakers.append(waker)
        try:
            yield waker
        finally:
            with self._changed:
                self._wakers.remove(waker)

    def _check_process(self) -> None:
        """In a forked child nothing more comes, and a lock may be held by a thread that is gone."""
        if os.getpid() != self._process and not self.done:
            raise UsageError(FORKED)

    def _all_that_came(self) -> Delta | None:
        with self._changed:
            if len(self._deltas) > 1:
                deltas, self._deltas = self._deltas, deque()
                return Delta.merged(deltas)
        return self._next()

    def _next(self) -> Delta | None:
        """The next delta, where something has come; None where all were handed out before."""
        with self._changed:
            if self._deltas:
                return self._deltas.popleft()
        if self._failure is not None:
            raise self._error()
        return None

    def _error(self) -> JackfieldError:
        """The failure as an error of our tree, on one line, with its cause chained."""
        assert self._failure is not None
        if isinstance(self._failure, JackfieldError):
            return self._failure
        what = error_text(self._failure)
        error = ExecutionError(f"the model failed: {what}")
        error.__cause__ = self._failure
        return error

    def deliver(self, delta: Delta) -> list[Waker]:
        """What a step made of it. Called by the worker; returns who is to be woken."""
        with self._changed:
            if self.streams:
                self._deltas.append(delta)
                if len(self._deltas) > BACKLOG:
                    self._deltas = deque([Delta.merged(self._deltas)])
            self._completion = delta.completion
            if self.done:
                self._engine = None
            return self._told() if self.streams or self.done else []

    def fail(self, failure: BaseException) -> list[Waker]:
        """Nothing more will come. Called by the worker; without effect on what has ended."""
        with self._changed:
            if self.done:
                return []
            self._failure, self._engine = failure, None
            return self._told()

    def _told(self) -> list[Waker]:
        """Wake the threads that wait; returns the event loops that do."""
        self._changed.notify_all()
        if self.done:  # who waits for that is not woken with each token
            self._end.notify_all()
        now = time.monotonic()
        return [waker for waker in self._wakers if self.done or waker.not_before <= now]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError("a request is its engine's and cannot be copied; copy its result()")


def wake(wakers: Iterable[Waker]) -> None:
    """Wake all of them, each event loop once: that is a system call, and a turn of the loop."""
    waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for waker in wakers:
        waiting.setdefault(waker.loop, []).append(waker.woken)
    for loop, all_of_it in waiting.items():
        try:
            loop.call_soon_threadsafe(_set, all_of_it)
        except RuntimeError:  # it was closed: nobody waits there any more
            continue


def _set(events: Iterable[asyncio.Event]) -> None:
    for woken in events:
        woken.set()


class Reader:
    """Who reads a request alone: it is cancelled when they leave, and when they are forgotten."""

    def __init__(self, request: Request) -> None:
        self.leave = request.cancel

    def __del__(self) -> None:
        self.leave()
