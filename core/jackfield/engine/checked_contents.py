"""Checks of what pages hold: keys and values are read back and compared with what was written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import PackedKVCache, StepBlock

if TYPE_CHECKING:
    from jackfield.contracts import PackedLayer, PageTables, ScheduledSequence, Step


WATCHED = 4  # sequences of a step whose tokens are sampled
SAMPLES = 32  # tokens of a sequence that are remembered, with their keys and values
READ_BACK = 256  # tokens of a sequence that are read back in one step
#: What another computation of the same tokens may be off by, as a part of their length: whose pages
#: are shared nobody says, and two steps of other shapes round in other ways.
COMPUTED_AGAIN = PackedKVCache.rounding


@dataclass(eq=False, slots=True)
class Sample:
    """Some tokens of a sequence, and the keys and values that each layer was handed for them.

    `states` has `[positions, kv_heads, head_dim]` of each layer that was called.
    """

    positions: list[int]
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Watched:
    """The samples of a sequence, and its tokens when the last was taken.

    A copy: the members of a search become other texts before they go. The first `shared` samples
    were taken of others that began alike, or of itself before its memory was taken.
    """

    salt: str
    tokens: Seq[int]
    samples: list[Sample] = field(default_factory=list)
    shared: int = 0


@dataclass(eq=False, slots=True)
class Part:
    """Tokens of a request that are read back together: this step's (`sample` None), or a sample.

    `slots` are where they are, `which` of this step's tokens or of the sample's they are, and
    `rounding` how far off they may be.
    """

    request: int
    sample: Sample | None
    rounding: float
    slots: torch.Tensor
    which: torch.Tensor


@dataclass(eq=False, slots=True)
class Reading:
    """What is read back, and sampled, in the layers that share page tables; `end` of all slots."""

    parts: list[Part]
    new: list[tuple[Sample, torch.Tensor]]
    end: int


class Contents:
    """What was stored for a few sequences, to be read back. Wrong text is found where it begins.

    `rounding`: see `PackedKVCache`. What layers are found to hold stays on the device until
    `judged`, so that nobody waits for it in every layer.
    """

    def __init__(self, rounding: float) -> None:
        self._rounding = rounding
        self._block: StepBlock | None = None
        self.clear()

    def clear(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._left: deque[Watched] = deque(maxlen=WATCHED)
        self._rest()

    def _rest(self) -> None:
        self._looked_at: list[tuple[int, int, ScheduledSequence]] = []  # row, its first token
        self._new: dict[int, Sample] = {}
        self._readings: dict[int, Reading] = {}
        self._found: list[tuple[str, int, list[Part], torch.Tensor]] = []

    def begin(self, step: Step) -> None:
        """A step that is looked at."""
        self._rest()
        at = 0
        for row, item in enumerate(step.scheduled):
            if len(self._looked_at) < WATCHED and item.num_tokens:
                self._looked_at.append((row, at, item))
                self._sample(item)
            at += item.num_tokens + len(item.drafts)

    def _sample(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        own = self._watched.get(sequence.id)
        if own is None and len(self._watched) >= 2 * WATCHED:
            return
        if own is None:
            own = Watched(sequence.settings.cache_salt, sequence.tokens[: item.start])
            known: dict[int, Sample] = {}  # several have the same ones
            for other in (*self._watched.values(), *self._left):
                if item.start and other.salt == own.salt:
                    known |= {id(one): one for one in _shared(other, own.tokens, item.start)}
            own.samples = list(known.values())[: SAMPLES // 4]
            own.shared = len(own.samples)
            self._watched[sequence.id] = own
        room = SAMPLES - sum(len(sample.positions) for sample in own.samples)
        first, last = item.start, item.start + item.num_tokens - 1
        places = sorted(
            {first, first + item.num_tokens // 3, first + 2 * item.num_tokens // 3, last}
        )
        if room >= len(places):
            self._new[sequence.id] = Sample(places)
            own.tokens = sequence.tokens[: last + 1]

    def look(self, layer: int, found: PackedLayer, keys: Any, values: Any) -> str:
        """Read back what `write` of a layer stored of `keys` and `values`.

        Returns what is wrong in words (empty: nothing), on a device other than the CPU only what
        can be told without waiting for it.
        """
        tables = found.tables
        if (reading := self._readings.get(id(tables))) is None:
            reading = self._readings[id(tables)] = self._reading(tables, keys.device)
        parts = [p for p in reading.parts if p.sample is None or layer in p.sample.states]
        pools = (found.keys, found.values)
        for at, (what, states) in enumerate((("keys", keys), ("values", values))):
            pool = pools[at].flatten(0, 1)
            if len(pool) < reading.end:
                return f"the {what} of layer {layer} have {len(pool)} places, and {reading.end} due"
            for rounding in {part.rounding for part in parts}:
                alike = [part for part in parts if part.rounding == rounding]
                due = torch.cat(
                    [
                        (states if p.sample is None else p.sample.states[layer][at])[p.which]
                        for p in alike
                    ]
                )
                stored = pool[torch.cat([p.slots for p in alike])]
                self._found.append((what, layer, alike, _near(stored, due, rounding)))
        for sample, which in reading.new:
            sample.states[layer] = (keys[which], values[which])
        return self.judged() if keys.device.type == "cpu" else ""

    def judged(self) -> str:
        """What was found wrong since it was last asked, in words; waits for the device once."""
        found, self._found = self._found, []
        if not found:
            return ""
        right = iter(torch.cat([near for *_, near in found]).tolist())
        for what, layer, parts, _ in found:
            for part in parts:
                if not all(next(right) for _ in range(len(part.slots))):
                    when = "this step" if part.sample is None else "a step before"
                    return (
                        f"the {what} of layer {layer} that request {part.request} was given in "
                        f"{when} are not in its pages"
                    )
        return ""

    def _reading(self, tables: PageTables, device: torch.device) -> Reading:
        if self._block is None or self._block.device != device:
            self._block = StepBlock(device)
        put, found = self._block.put, Reading([], [], 0)
        for row, at, item in self._looked_at:
            own, first, size = tables.tables[row], tables.firsts[row], tables.page_size
            for sample, positions, which in self._wanted(row, at, item, tables):
                slots = [own[(p - first) // size] * size + (p - first) % size for p in positions]
                number = item.sequence.id
                rounding = self._bound(number, sample)
                found.parts.append(Part(number, sample, rounding, put(slots), put(which)))
                found.end = max(found.end, *(slot + 1 for slot in slots))
            if (new := self._new.get(item.sequence.id)) is not None:
                found.new.append((new, put([p - item.start + at for p in new.positions])))
        self._block.send()
        return found

    def _bound(self, number: int, sample: Sample | None) -> float:
        """How far off a sample of a sequence may be."""
        own = self._watched.get(number)
        others = () if own is None else own.samples[: own.shared]
        shared = any(sample is one for one in others)
        return max(self._rounding, COMPUTED_AGAIN) if shared else self._rounding

    def _wanted(
        self, row: int, at: int, item: ScheduledSequence, tables: PageTables
    ) -> Iterator[tuple[Sample | None, list[int], list[int]]]:
        """This step's tokens (None) and each sample: positions, and which of them they are."""
        length = item.num_tokens + len(item.drafts)
        fed = range(max(0, length - READ_BACK), length)
        yield None, [item.start + i for i in fed], [at + i for i in fed]
        oldest, watched = tables.oldest(row), self._watched.get(item.sequence.id)
        for sample in () if watched is None else watched.samples:
            still = [i for i, p in enumerate(sample.positions) if oldest <= p < item.start]
            if still:
                yield sample, [sample.positions[i] for i in still], still

    def end(self) -> None:
        """The step was committed: what was sampled is there."""
        for number, sample in self._new.items():
            if number in self._watched:
                self._watched[number].samples.append(sample)
        self._rest()

    def leave(self, number: int, *, kept: bool = True) -> None:
        """A sequence goes; what it has may be claimed for another one that begins alike."""
        self._new.pop(number, None)
        if (gone := self._watched.pop(number, None)) is not None and kept:
            self._left.append(gone)


def _shared(other: Watched, tokens: Seq[int], end: int) -> list[Sample]:
    """The samples of another sequence whose tokens this one has had from the beginning."""
    pairs = zip(tokens, other.tokens, strict=False)
    same = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other.tokens))
    )
    return [sample for sample in other.samples if max(sample.positions) < min(same, end)]


def _near(found: torch.Tensor, due: torch.Tensor, rounding: float) -> torch.Tensor:
    """Which tokens are no further from `due` than a cache may round them; bool `[tokens]`."""
    wide = torch.promote_types(due.dtype, torch.float32)
    found, due = found.flatten(1).to(wide), due.flatten(1).to(wide)
    length = due.norm(dim=1)
    near: torch.Tensor = ((found - due).norm(dim=1) <= rounding * length) | ~length.isfinite()
    return near
