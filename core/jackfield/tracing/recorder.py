"""What a trace notes while it goes on: spans of work, as they end, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST = 200_000  # spans that are kept: some 40 MB
BESIDE = 20_000  # spans of other threads that are kept


@dataclass(frozen=True, eq=False)
class Work:
    """A sort of work. `kind` is its row in the table, `name` what one span of it is called.

    `backend` is who does it, `where` is "device" for work that a device does, too.
    """

    kind: str
    name: str
    backend: str | None = None
    where: str = "host"


class Fed(NamedTuple):
    """What a step fed: (request, tokens) of each sequence.

    `decode`: each its last token only, and none that of a prompt.
    """

    sequences: tuple[tuple[int, int], ...]
    decode: bool

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.sequences)


class Span(NamedTuple):
    """From `begin` to `end` in ns; `detail` is a layer, a request, or what a step fed.

    `device` is when the device did it, in ns of the host's clock; None: that was not measured.
    """

    work: Work
    begin: int
    end: int
    detail: Any = None
    device: Any = None


class Beside(NamedTuple):
    """A span of another thread than the one that takes the steps: its number and its name."""

    work: Work
    begin: int
    end: int
    thread: tuple[int, str]


class Recorder:
    """Takes spans of the thread that takes steps, in the order in which they end.

    They are kept in blocks of a step each; beyond `MOST` spans the oldest blocks are dropped.
    `stamp` marks now in what a device computes; None: there is no device beside the host.
    """

    def __init__(self, stamp: Callable[[], Any] | None = None) -> None:
        self.clock = time.perf_counter_ns
        self.stamp = stamp
        self.dropped = 0
        self._spans: list[tuple[Any, ...]] = []
        self.note = self._spans.append  # tuples: to make a `Span` takes as long as all the rest
        self._blocks: deque[list[tuple[Any, ...]]] = deque()
        self._kept = 0
        self._beside: deque[Beside] = deque(maxlen=BESIDE)
        self._beside_noted = 0

    def timed(
        self,
        call: Callable[..., Any],
        work: Work,
        detail: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> Callable[..., Any]:
        """`call`, noted as `work`. `detail` finds it in the arguments. What raises is not noted."""
        clock, note, stamp = self.clock, self.note, self.stamp

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            found = call(*args, **kwargs)
            note((work, begin, clock(), detail and detail(args), None))
            return found

        def stamped(*args: Any, **kwargs: Any) -> Any:
            assert stamp is not None
            begin, start = clock(), stamp()
            found = call(*args, **kwargs)
            stamps = (start, stamp())
            note((work, begin, clock(), detail and detail(args), stamps))
            return found

        return timed if stamp is None or work.where != "device" else stamped

    def timed_beside(self, call: Callable[..., Any], work: Work) -> Callable[..., Any]:
        """The same for a call that any thread makes."""
        clock = self.clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            found = call(*args, **kwargs)
            self._beside_noted += 1
            thread = threading.current_thread()
            self._beside.append(Beside(work, begin, clock(), (thread.ident or 0, thread.name)))
            return found

        return timed

    def cut(self) -> None:
        """A step has ended: what was noted is a block."""
        block = self._spans[:]
        self._spans.clear()
        self._blocks.append(block)
        self._kept += len(block)
        while self._kept > MOST and len(self._blocks) > 1:
            gone = len(self._blocks.popleft())
            self._kept -= gone
            self.dropped += gone

    def blocks(self) -> list[list[Span]]:
        """What is kept, oldest first; in `device` are stamps."""
        self.cut()
        return [[Span(*raw) for raw in block] for block in self._blocks if block]

    def beside(self) -> list[Beside]:
        """Spans of other threads, outer ones before those within them."""
        self.dropped += max(0, self._beside_noted - BESIDE)
        return sorted(self._beside, key=lambda one: (one.begin, -one.end))
