"""Pages held to what was stored in them: whose they are, what is in them, and what is claimed.

What costs more than microseconds is looked at in a few steps only: the first ones, those in which
the first sequences come, and then after 8, 16, 32, … steps (`Spots`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from jackfield.errors import quoted

if TYPE_CHECKING:
    from jackfield.contracts import Feed, PackedLayer, PageTables, Sequence, Step

FIRST = 4  # steps that are looked at one after the other
NEWCOMERS = 32  # sequences whose first step is looked at
WATCHED = 4  # sequences of a step whose tokens are sampled
SAMPLES = 32  # tokens of a sequence that are remembered, with their keys and values
READ_BACK = 256  # tokens of a sequence that are read back in one step
ROUNDED = 0.25  # how far, of its length, a cache may round the keys or values of a token
REMEMBERED = 1 << 20  # tokens of sequences that have left

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Spots:
    """Which steps are looked at closely."""

    def __init__(self) -> None:
        self._steps = 0
        self._newcomers = NEWCOMERS
        self._met: set[int] = set()

    def next(self, feeds: Seq[Feed]) -> bool:
        self._steps += 1
        new = False
        for feed in feeds:
            if feed.sequence.id not in self._met:
                self._met.add(feed.sequence.id)
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
        """Called before it goes, or is evicted."""
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


@dataclass(slots=True)
class Sample:
    """Some tokens of a sequence, and the keys and values that each layer was handed for them.

    `states` has `[positions, kv_heads, head_dim]` of each layer that was called.
    """

    positions: list[int]
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Watched:
    """The samples of a sequence."""

    salt: str
    tokens: Seq[int]
    samples: list[Sample] = field(default_factory=list)


class Contents:
    """What was stored for a few sequences, to be read back. Wrong text is found where it begins."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._left: deque[Watched] = deque(maxlen=WATCHED)
        self._feeds: list[tuple[int, int, Feed]] = []  # row, first token in the step, feed
        self._new: dict[int, Sample] = {}
        self._slots: dict[tuple[int, int], list[tuple[Sample | None, Any, Any]]] = {}

    def begin(self, step: Step) -> None:
        """A step that is looked at."""
        self._feeds, self._new, at = [], {}, 0
        self._slots = {}
        for row, feed in enumerate(step.feeds):
            if len(self._feeds) < WATCHED and feed.count:
                self._feeds.append((row, at, feed))
                self._sample(feed)
            at += feed.count + len(feed.drafts)

    def _sample(self, feed: Feed) -> None:
        sequence = feed.sequence
        own = self._watched.get(sequence.id)
        if own is None and len(self._watched) >= 2 * WATCHED:
            return
        if own is None:
            own = Watched(sequence.settings.cache_salt, sequence.tokens)
            known: dict[int, Sample] = {}  # several have the same ones
            for other in (*self._watched.values(), *self._left):
                if feed.start and other.salt == own.salt:
                    known |= {id(one): one for one in _shared(other, own.tokens, feed.start)}
            own.samples = list(known.values())[: SAMPLES // 4]
            self._watched[sequence.id] = own
        room = SAMPLES - sum(len(sample.positions) for sample in own.samples)
        first, last = feed.start, feed.start + feed.count - 1
        places = sorted({first, first + feed.count // 3, first + 2 * feed.count // 3, last})
        if room >= len(places):
            self._new[sequence.id] = Sample(places)

    def look(self, layer: int, found: PackedLayer, keys: Any, values: Any) -> str:
        """What is wrong with what `write` of a layer returned, in words; empty: nothing."""
        for row, at, feed in self._feeds:
            for sample, index, due in self._places(row, at, feed, found.tables, keys.device):
                states = (keys, values) if sample is None else sample.states.get(layer)
                if states is None:
                    continue
                pools = (found.keys, found.values)
                for what, pool, states_of in zip(("keys", "values"), pools, states, strict=True):
                    wanted = states_of.index_select(0, due)
                    if _differ(pool.flatten(0, 1).index_select(0, index), wanted):
                        when = "this step" if sample is None else "a step before"
                        return (
                            f"the {what} of layer {layer} that request {feed.sequence.id} was "
                            f"given in {when} are not in its pages"
                        )
            if (new := self._new.get(feed.sequence.id)) is not None:
                own = torch.tensor([p - feed.start + at for p in new.positions], device=keys.device)
                new.states[layer] = (keys.index_select(0, own), values.index_select(0, own))
        return ""

    def _places(
        self, row: int, at: int, feed: Feed, tables: PageTables, device: torch.device
    ) -> list[tuple[Sample | None, Any, Any]]:
        """For this step's tokens (None) and each sample: their slots, and which of its states."""
        if (known := self._slots.get((row, id(tables)))) is not None:
            return known
        length = feed.count + len(feed.drafts)
        fed = range(max(0, length - READ_BACK), length)
        wanted: list[tuple[Sample | None, list[int], list[int]]] = [
            (None, [feed.start + i for i in fed], [at + i for i in fed])
        ]
        oldest = tables.oldest(row)
        watched = self._watched.get(feed.sequence.id)
        for sample in () if watched is None else watched.samples:
            still = [i for i, p in enumerate(sample.positions) if oldest <= p < feed.start]
            if still:
                wanted.append((sample, [sample.positions[i] for i in still], still))
        own, first, size = tables.tables[row], tables.firsts[row], tables.page_size
        found = self._slots[row, id(tables)] = [
            (
                sample,
                torch.tensor(
                    [own[(p - first) // size] * size + (p - first) % size for p in positions],
                    device=device,
                ),
                torch.tensor(which, device=device),
            )
            for sample, positions, which in wanted
        ]
        return found

    def end(self) -> None:
        """The step was committed: what was sampled is there."""
        for number, sample in self._new.items():
            if number in self._watched:
                self._watched[number].samples.append(sample)
        self._new, self._feeds, self._slots = {}, [], {}

    def leave(self, number: int, *, kept: bool = True) -> None:
        """A sequence goes; what it has may be claimed for another one that begins alike."""
        self._new.pop(number, None)
        if (gone := self._watched.pop(number, None)) is not None and kept:
            gone.tokens = list(gone.tokens)
            self._left.append(gone)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


def _shared(other: Watched, tokens: Seq[int], end: int) -> list[Sample]:
    """The samples of another sequence whose tokens this one has had from the beginning."""
    pairs = zip(tokens, other.tokens, strict=False)
    same = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other.tokens))
    )
    return [sample for sample in other.samples if max(sample.positions) < min(same, end)]


def _differ(found: torch.Tensor, due: torch.Tensor) -> bool:
    """Whether they are not the same bit by bit, and further apart than a cache may round."""
    bits = _BITS[due.element_size()]
    if found.dtype == due.dtype and torch.equal(found.view(bits), due.contiguous().view(bits)):
        return False
    found, due = found.flatten(1).double(), due.flatten(1).double()
    length = due.norm(dim=1)
    near = (found - due).norm(dim=1) <= ROUNDED * length
    return not bool((near | ~length.isfinite()).all())


class Owners:
    """Whose pages are whose, for the layers that remember alike."""

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}  # page -> the last who showed it
        self._rows: dict[int, tuple[int, ...]] = {}

    def look(self, tables: PageTables, feeds: Seq[Feed], number: int, *, whole: bool) -> str:
        """What is wrong with the pages of a step, in words; rows that grew, or all (`whole`)."""
        rows: dict[int, int] | None = None
        for row, feed in enumerate(feeds):
            own, me = tables.tables[row], feed.sequence.id
            state = (len(own), tables.firsts[row], own[0], own[-1])
            if not whole and self._rows.get(me) == state:
                continue
            self._rows[me] = state
            if min(own) < 0 or max(own) >= number:
                return f"page {quoted(own)} for feed {row}, of {number}"
            if len(set(own)) < len(own):
                return f"a page twice in {quoted(own)} for feed {row}"
            for at, page in enumerate(own):
                other = self._owner.get(page)
                if other is not None and other != me:
                    if rows is None:
                        rows = {f.sequence.id: i for i, f in enumerate(feeds)}
                    if other in rows and not _may_share(tables, feeds, (row, rows[other]), at):
                        return f"page {page} for requests {me} and {other}, which part before it"
                self._owner[page] = me
        return ""

    def left(self, number: int) -> None:
        self._rows.pop(number, None)


def _may_share(tables: PageTables, feeds: Seq[Feed], pair: tuple[int, int], at: int) -> bool:
    """Whether two rows may both have the `at`th page of the first: read alike, written by none."""
    mine, other = pair
    page, size = tables.tables[mine][at], tables.page_size
    if page not in tables.tables[other]:
        return True  # it was the other's
    start = tables.firsts[mine] + at * size
    if start != tables.firsts[other] + list(tables.tables[other]).index(page) * size:
        return False
    end = start + size
    first, second = feeds[mine], feeds[other]
    if end > first.start or end > second.start:
        return False
    return first.sequence.tokens[:end] == second.sequence.tokens[:end]
