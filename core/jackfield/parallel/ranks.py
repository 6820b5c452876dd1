"""How the processes of one model meet, agree, and find out that one of them is gone.

Rank 0 leads: it has the engine, and each other rank a connection to it. Until a model is loaded all
ranks `exchange` records; afterwards only rank 0 speaks. A connection that ends is a process that
has ended: that is noticed within milliseconds, whatever the process computes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from jackfield.errors import RanksError, shown
from jackfield.parallel.wire import Wire

logger = logging.getLogger("jackfield")

START_WITHIN = 2 * 3600.0  # seconds for what ranks do between two exchanges: reading weights
STEP_WITHIN = 60.0  # seconds for a sum over all ranks
LEAVE_WITHIN = 10.0  # seconds for a rank to end by itself
AGAIN = "load the model again"

_END, _FAILED = "end", "failed"


class Ranks(ABC):
    """The processes that share one model, as one of them sees the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def exchange(self, record: Any) -> list[Any]:
        """The records of all ranks, in their order. Raises RanksError where one has failed."""

    @abstractmethod
    def fail(self, why: str) -> None:
        """Tell the others that this one cannot go on."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the others."""


class Leader(Ranks):
    """Rank 0. `cause` is why the ranks cannot go on; None: they can.

    `ended` tells how a process of ours has ended, by its rank, where we have started it.
    """

    def __init__(self, wires: Mapping[int, Wire], ended: Callable[[int], str | None]) -> None:
        super().__init__(0, len(wires) + 1)
        self._wires = dict(wires)
        self._ended = ended
        self._lost = threading.Event()
        self._closing = False
        self._watchers: list[threading.Thread] = []
        self.cause: str | None = None
        self.sent = 0  # messages of steps

    def exchange(self, record: Any) -> list[Any]:
        found = [record]
        for rank, wire in sorted(self._wires.items()):
            try:
                message = wire.receive(START_WITHIN)
            except (OSError, EOFError, ValueError) as error:
                self._lose(rank, error)
                break
            if _FAILED in message:
                self._break(f"rank {rank}: {message[_FAILED]}")
                break
            found.append(message["record"])
        self.check()
        self.send({"records": found})
        return found

    def watch(self) -> None:
        """Listen to the others from now on, each in a thread that lives as long as it does."""
        for rank, wire in self._wires.items():
            name = f"jackfield-rank-{rank}"
            watcher = threading.Thread(target=self._listen, args=(rank, wire), name=name)
            watcher.daemon = True
            watcher.start()
            self._watchers.append(watcher)

    def _listen(self, rank: int, wire: Wire) -> None:
        try:
            message = wire.receive()
        except (OSError, EOFError, ValueError) as error:
            self._lose(rank, error)
            return
        self._break(f"rank {rank}: {message.get(_FAILED, message)}")

    def send(self, message: Any) -> None:
        """Tell all others. Raises RanksError where one is gone."""
        self.check()
        for rank, wire in self._wires.items():
            try:
                wire.send(message)
            except OSError as error:
                self._lose(rank, error)
        self.sent += 1
        self.check()

    def check(self) -> None:
        """Raise RanksError where the ranks cannot go on."""
        if self.cause is not None:
            raise RanksError(f"{self.cause}; {AGAIN}")

    def blame(self, error: BaseException, seconds: float) -> RanksError:
        """The error of a step that failed: by the rank that ended, if one did just now.

        One that took `STEP_WITHIN` seconds, or more, has waited for one that does not answer.
        """
        self._lost.wait(2.0)
        why = f"rank 0: {shown(error, 400)}"
        if seconds >= STEP_WITHIN:
            others = " or ".join(map(str, sorted(self._wires)))
            why = f"rank {others} did not answer within {STEP_WITHIN:g} s in a step ({why})"
        self.fail(why)
        return RanksError(f"{self.cause}; {AGAIN}")

    def fail(self, why: str) -> None:
        """Break off: the others end, as their connection does."""
        self._break(why)

    def _lose(self, rank: int, error: BaseException) -> None:
        if self._closing or self.cause is not None:
            return
        how = self._ended(rank) or shown(error)
        self._break(f"rank {rank} of the {self.size} processes of this model has ended ({how})")

    def _break(self, why: str) -> None:
        """Note why, once, and let the others end."""
        if self.cause is None and not self._closing:
            self.cause = why
            logger.error("%s", why)
            self._each({_FAILED: why})
        self._lost.set()
        for wire in self._wires.values():
            wire.finish()

    def _each(self, message: Any) -> None:
        for wire in self._wires.values():
            try:
                wire.send(message)
            except OSError:
                continue  # that is the one

    def close(self) -> None:
        """Let the others end: they give back what they hold, and exit."""
        if not self._closing:
            self._closing = True
            self._each({_END: True})
            for watcher in self._watchers:
                watcher.join(LEAVE_WITHIN)
            for wire in self._wires.values():
                wire.close()


class Follower(Ranks):
    """Another rank. Where rank 0 is gone, this process ends within `LEAVE_WITHIN` seconds."""

    def __init__(self, rank: int, size: int, wire: Wire) -> None:
        super().__init__(rank, size)
        self._wire = wire
        self._messages: list[Any] = []
        self._changed = threading.Condition()
        self._left = threading.Event()  # this process gets on without the others

    def exchange(self, record: Any) -> list[Any]:
        try:
            with contextlib.suppress(OSError):  # what rank 0 said last is there all the same
                self._wire.send({"record": record})
            message = self._wire.receive(START_WITHIN)
        except (OSError, EOFError, ValueError) as error:
            raise RanksError(f"rank 0 has ended while rank {self.rank} started: {error}") from error
        if _FAILED in message:
            raise RanksError(str(message[_FAILED]))
        records: list[Any] = message["records"]
        return records

    def watch(self) -> None:
        """Take in what rank 0 says from now on, in a thread: also while this one computes."""
        threading.Thread(target=self._listen, name="jackfield-rank-0", daemon=True).start()

    def _listen(self) -> None:
        last: Any = None
        while last is None:
            try:
                message = self._wire.receive()
            except (OSError, EOFError, ValueError) as error:
                message = {_FAILED: f"rank 0 has ended: {error}"}
            if isinstance(message, dict):
                last = message
            with self._changed:
                self._messages.append(message)
                self._changed.notify()
        # A collective that waits for the others may never end.
        if _FAILED in last and not self._left.wait(LEAVE_WITHIN):
            os._exit(1)

    def next(self) -> Any:
        """What rank 0 says next; None: it has closed its engine. Raises RanksError."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages)
            message = self._messages.pop(0)
        if isinstance(message, dict):
            if _END in message:
                return None
            raise RanksError(str(message.get(_FAILED)))
        return message

    def fail(self, why: str) -> None:
        try:
            self._wire.send({_FAILED: why})
        except OSError:
            logger.error("rank 0 is not there to be told: %s", why)

    def close(self) -> None:
        self._left.set()
        self._wire.close()
