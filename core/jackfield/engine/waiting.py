"""The queue of waiting requests: heaps, so that a step looks only at those that it lets in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from jackfield.contracts import Sequence

S = TypeVar("S", bound=Sequence)

SLACK = 64  # entries of those that have left, beside one for each that is there


class Order(Protocol):
    """What a schedule says of those that wait."""

    @property
    def patience(self) -> float: ...

    def key(self, sequence: Sequence) -> tuple[float, ...]: ...


class SequenceHeap(Generic[S]):
    """Sequences by a key, the smallest first, then by `id`. One may leave wherever it stands.

    Its entry stays until it comes up, or until most of the entries are such, so that no call looks
    for it. Each call takes O(log n), on average over calls.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[object, int, int]] = []  # key, id, ticket
        self._held: dict[int, tuple[int, S]] = {}  # by id: the ticket of its entry, and itself
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence.id in self._held

    def push(self, sequence: S, key: object) -> None:
        """Put in `sequence`, which is not there. Keys must be comparable with each other."""
        ticket = next(self._tickets)
        self._held[sequence.id] = (ticket, sequence)
        heappush(self._entries, (key, sequence.id, ticket))

    def discard(self, sequence: S) -> None:
        """Take it out, if it is there."""
        if self._held.pop(sequence.id, None) is None:
            return
        if len(self._entries) > SLACK + 2 * len(self._held):
            self._entries = [entry for entry in self._entries if self._is_held(entry)]
            heapify(self._entries)

    def first(self) -> S | None:
        """The one with the smallest key, which stays."""
        while self._entries and not self._is_held(self._entries[0]):
            heappop(self._entries)
        return self._held[self._entries[0][1]][1] if self._entries else None

    def _is_held(self, entry: tuple[object, int, int]) -> bool:
        _, number, ticket = entry
        return number in self._held and self._held[number][0] == ticket


class WaitingQueue(Generic[S]):
    """Those that wait, in the order of `schedule`; its `key` is asked once for each that comes.

    Who has waited for its `patience` goes before all others, by when it came. One may be put aside
    until another, its leader, is further, and passed over until the next `rank`.
    """

    def __init__(self, schedule: Order) -> None:
        self._schedule = schedule
        self.clear()

    def clear(self) -> None:
        self._all: dict[int, S] = {}
        self._coming: dict[int, S] = {}  # who get a place at the next `rank`
        self._keys: dict[int, tuple[float, ...]] = {}
        self._aside: dict[int, dict[int, S]] = {}  # by their leader's id
        self._by_key: SequenceHeap[S] = SequenceHeap()
        self._by_time: SequenceHeap[S] = SequenceHeap()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[S]:
        return iter(self._all.values())

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence.id in self._all

    def add(self, sequence: S) -> None:
        """Let it wait; the schedule is not asked before `rank`."""
        self._all[sequence.id] = self._coming[sequence.id] = sequence

    def discard(self, sequence: S) -> None:
        """It waits no more, if it did."""
        if self._all.pop(sequence.id, None) is None:
            return
        self._coming.pop(sequence.id, None)
        self._keys.pop(sequence.id, None)
        if sequence.leader is not None:
            self._aside.get(sequence.leader.id, {}).pop(sequence.id, None)
        self._displace(sequence)

    def rank(self) -> None:
        """Give those that have come since the last call their places. Raises what `key` raises."""
        coming, self._coming = self._coming, {}
        for sequence in coming.values():
            if sequence.id not in self._keys:
                self._keys[sequence.id] = self._schedule.key(sequence)
            self._by_key.push(sequence, self._keys[sequence.id])
            self._by_time.push(sequence, sequence.arrival)

    def first(self, now: float) -> S | None:
        """Who enters next of those that have their places; `now` by the clock of `arrival`."""
        eldest = self._by_time.first()
        if eldest is not None and now - eldest.arrival >= self._schedule.patience:
            return eldest
        return self._by_key.first()

    def put_aside(self, sequence: S) -> None:
        """It is not `first` before `call_back` is called with its leader."""
        assert sequence.leader is not None
        self._displace(sequence)
        self._aside.setdefault(sequence.leader.id, {})[sequence.id] = sequence

    def pass_over(self, sequence: S) -> None:
        """It is not `first` before the next `rank`."""
        self._displace(sequence)
        self._coming[sequence.id] = sequence

    def _displace(self, sequence: S) -> None:
        self._by_key.discard(sequence)
        self._by_time.discard(sequence)

    @property
    def leaders(self) -> bool:
        """Whether somebody was put aside."""
        return bool(self._aside)

    def call_back(self, leader: S) -> None:
        """Who was put aside because of `leader` gets a place again at the next `rank`."""
        self._coming |= self._aside.pop(leader.id, {})
