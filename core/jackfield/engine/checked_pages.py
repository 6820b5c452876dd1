"""Checks of pages: which sequence owns each, what is in it, how many tokens are said to be cached.

Checks that cost more than microseconds run in a few steps only (`Spots`): the first ones, those in
which the first sequences come, and then after 8, 16, 32, … steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from jackfield.errors import quoted

if TYPE_CHECKING:
    from jackfield.contracts import PageTables, ScheduledSequence, Sequence

FIRST = 4  # steps that are looked at one after the other
NEWCOMERS = 32  # sequences whose first step is looked at
REMEMBERED = 1 << 20  # tokens of sequences that have left


class Spots:
    """Which steps are looked at closely."""

    def __init__(self) -> None:
        self._steps = 0
        self._newcomers = NEWCOMERS
        self._met: set[int] = set()

    def next(self, scheduled: Seq[ScheduledSequence]) -> bool:
        self._steps += 1
        new = False
        for item in scheduled:
            if item.sequence.id not in self._met:
                self._met.add(item.sequence.id)
                new = True
        self._newcomers -= new
        early = self._steps <= FIRST or (new and self._newcomers >= 0)
        return early or self._steps & (self._steps - 1) == 0

    def left(self, number: int) -> None:
        self._met.discard(number)


class Prefixes:
    """What a cache was given, so that it claims nothing else. Says nothing once it has forgotten.

    Of sequences that have left, some `REMEMBERED` tokens.
    """

    def __init__(self) -> None:
        self._here: dict[int, Sequence] = {}
        self._left: deque[tuple[str, list[int]]] = deque()
        self._tokens = 0
        self.forgotten = False  # something that it may claim

    def admit(self, sequence: Sequence) -> bool:
        """Whether it can have the first `num_cached` tokens of a sequence that enters."""
        self._here[sequence.id] = sequence
        if not (count := sequence.num_cached) or self.forgotten:
            return True
        due, salt = sequence.tokens[:count], sequence.settings.cache_salt
        return any(own == salt and known[:count] == due for own, known in self._left) or any(
            other is not sequence
            and other.settings.cache_salt == salt
            and other.tokens[: min(count, other.num_cached)] == due
            for other in self._here.values()
        )

    def leave(self, sequence: Sequence) -> None:
        """Called before it goes, or is preempted."""
        if self._here.pop(sequence.id, None) is None or not sequence.num_cached:
            return
        tokens = sequence.tokens[: sequence.num_cached]
        self._left.append((sequence.settings.cache_salt, tokens))
        self._tokens += len(tokens)
        while self._tokens > REMEMBERED:
            self._tokens -= len(self._left.popleft()[1])
            self.forgotten = True

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


class Owners:
    """Whose pages are whose, for the layers that remember alike."""

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}  # page -> the last who showed it
        self._rows: dict[int, tuple[int, ...]] = {}

    def look(
        self, tables: PageTables, scheduled: Seq[ScheduledSequence], number: int, *, whole: bool
    ) -> str:
        """What is wrong with the pages of a step, in words; rows that grew, or all (`whole`)."""
        rows: dict[int, int] | None = None
        for row, item in enumerate(scheduled):
            own, me = tables.tables[row], item.sequence.id
            state = (len(own), tables.firsts[row], own[0], own[-1])
            if not whole and self._rows.get(me) == state:
                continue
            self._rows[me] = state
            if min(own) < 0 or max(own) >= number:
                return f"page {quoted(own)} for scheduled[{row}], of {number}"
            if len(set(own)) < len(own):
                return f"a page twice in {quoted(own)} for scheduled[{row}]"
            for at, page in enumerate(own):
                other = self._owner.get(page)
                if other is not None and other != me:
                    if rows is None:
                        rows = {f.sequence.id: i for i, f in enumerate(scheduled)}
                    if other in rows and not _may_share(tables, scheduled, (row, rows[other]), at):
                        return f"page {page} for requests {me} and {other}, which part before it"
                self._owner[page] = me
        return ""

    def left(self, number: int) -> None:
        self._rows.pop(number, None)


def _may_share(
    tables: PageTables, scheduled: Seq[ScheduledSequence], pair: tuple[int, int], at: int
) -> bool:
    """Whether two rows may both have the `at`th page of the first: read alike, written by none."""
    mine, other = pair
    page, size = tables.tables[mine][at], tables.page_size
    if page not in tables.tables[other]:
        return True  # it was the other's
    start = tables.firsts[mine] + at * size
    if start != tables.firsts[other] + list(tables.tables[other]).index(page) * size:
        return False
    end = start + size
    first, second = scheduled[mine], scheduled[other]
    if end > first.start or end > second.start:
        return False
    return first.sequence.tokens[:end] == second.sequence.tokens[:end]
