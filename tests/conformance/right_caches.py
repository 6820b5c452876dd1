"""Packed caches of strangers, of many designs, each right by construction and as plain as can be.

A sequence has the keys and values of its tokens in a list of pages per layer group; each token is
stored where the table says, and nothing else is clever. What differs is told by `Design`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from jackfield.contracts import (
    BindContext,
    Cache,
    CacheCapabilities,
    ModelInputs,
    PackedKVCache,
    PackedLayer,
    PackedStep,
    PageTables,
    Span,
)

Rounds = Callable[[torch.Tensor], torch.Tensor]


def exactly(states: torch.Tensor) -> torch.Tensor:
    return states


def in_bfloat16(states: torch.Tensor) -> torch.Tensor:
    return states.bfloat16().to(states.dtype)


def in_int8(states: torch.Tensor) -> torch.Tensor:
    """One scale for each token and head."""
    scale = states.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    whole = (states / scale).round().clamp(-127, 127)  # of bfloat16 it may be 128
    return whole.to(torch.int8).to(states.dtype) * scale


def in_two_bits(states: torch.Tensor) -> torch.Tensor:
    """Four values between the least and the greatest of each token and head."""
    least, most = states.aminmax(dim=-1, keepdim=True)
    step = ((most - least) / 3).clamp_min(1e-30)
    return ((states - least) / step).round() * step + least


@dataclass(frozen=True)
class Design:
    """`pick`: which of the free pages is taken next. `spare`: pages beyond those needed.

    `each_layer`: a table for every layer, not for all of a window. `one_pool`: all layers' pages
    lie in one pool. `grows`: by how many pages a pool grows when it is full, into other memory.
    `copies`: a fork copies pages at once; otherwise they are shared until one writes. `shares`:
    pages of prefixes, whole ones or (`partly`) also tokens of the next, which are copied. `swaps`:
    what is preempted is kept aside and comes back. `moves`: every step all pages lie elsewhere.
    `keeps`: a window lets go of nothing. `rounds`: what is left of keys and values once stored.
    """

    page_size: int = 4
    pick: Callable[[list[int]], int] = min
    spare: int = 0
    each_layer: bool = False
    one_pool: bool = False
    grows: int = 8
    copies: bool = False
    shares: bool = False
    partly: bool = False
    swaps: bool = False
    moves: bool = False
    keeps: bool = False
    rounds: Rounds = exactly
    rounding: float | None = None


class Pool:
    """Pages of one layer, or of all."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def hold(self, pages: int, size: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make room for `pages` pages of tokens like these."""
        for name, like in (("keys", keys), ("values", values)):
            old = getattr(self, name)
            if old is None or len(old) < pages:
                new = torch.full((pages, size, *like.shape[1:]), 7.0, dtype=like.dtype)
                if old is not None:
                    new[: len(old)] = old
                setattr(self, name, new)


@dataclass
class Table:
    """The pages of one sequence; the first holds token `first`."""

    pages: list[int] = field(default_factory=list)
    first: int = 0


class Group:
    """Layers that share tables."""

    def __init__(self, window: int | None, design: Design, allocator: Allocator) -> None:
        self.window, self.design, self.allocator = window, design, allocator
        self.tables: dict[int, Table] = {}
        self.pools: dict[int, Pool] = {}
        self.now: PageTables

    def own(self, number: int, start: int, end: int) -> None:
        """Have pages for tokens up to `end`, and those from `start` on to itself."""
        table, size = self.tables[number], self.design.page_size
        while table.first + len(table.pages) * size < end + self.design.spare * size:
            table.pages.append(self.allocator.take())
        for at in range((start - table.first) // size, len(table.pages)):
            if self.allocator.users[table.pages[at]] > 1:
                table.pages[at] = self.copied(table.pages[at])

    def copied(self, page: int) -> int:
        new = self.allocator.take()
        for pool in self.pools.values():
            if pool.keys is not None and pool.values is not None and page < len(pool.keys):
                pool.hold(self.allocator.size, self.design.page_size, pool.keys[0], pool.values[0])
                pool.keys[new] = pool.keys[page]
                pool.values[new] = pool.values[page]
        self.allocator.give([page])
        return new

    def forget_before(self, number: int, oldest: int) -> None:
        """Give back the pages that no query sees any more."""
        table, size = self.tables[number], self.design.page_size
        gone = 0 if self.design.keeps else max(0, oldest - table.first) // size
        self.allocator.give(table.pages[:gone])
        table.pages, table.first = table.pages[gone:], table.first + gone * size

    def cut(self, number: int, tokens: int) -> None:
        """Give back the pages behind the first `tokens` tokens."""
        table = self.tables[number]
        left = max(0, -(-(tokens - table.first) // self.design.page_size)) + self.design.spare
        self.allocator.give(table.pages[left:])
        table.pages = table.pages[:left]

    def drop(self, number: int) -> None:
        if (table := self.tables.pop(number, None)) is not None:
            self.allocator.give(table.pages)

    def slots(self, number: int, start: int, end: int) -> list[int]:
        table, size = self.tables[number], self.design.page_size
        return [
            table.pages[(at - table.first) // size] * size + (at - table.first) % size
            for at in range(start, end)
        ]


class Allocator:
    def __init__(self, design: Design) -> None:
        self.design, self.size = design, design.grows
        self.free = list(range(self.size))
        self.users: dict[int, int] = {}

    def take(self) -> int:
        if not self.free:
            self.free += range(self.size, self.size + self.design.grows)
            self.size += self.design.grows
        page = self.design.pick(self.free)
        self.free.remove(page)
        self.users[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        for page in pages:
            self.users[page] += 1
        return list(pages)

    def give(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                del self.users[page]
                self.free.append(page)


class RightCache(PackedKVCache):
    """See `Design`."""

    def __init__(self, windows: tuple[int | None, ...], design: Design) -> None:
        self.design, self.page_size = design, design.page_size
        if design.rounding is not None:
            self.rounding = design.rounding
        one = Allocator(design)
        lone = design.each_layer or design.one_pool
        by_key: dict[Any, Group] = {}
        self.group_of = []
        pool = Pool()
        for layer, window in enumerate(windows):
            key = layer if lone else window
            if key not in by_key:
                by_key[key] = Group(window, design, one if design.one_pool else Allocator(design))
            by_key[key].pools[layer] = pool if design.one_pool else Pool()
            self.group_of.append(by_key[key])
        self.groups = list(by_key.values())
        self.running: dict[int, Any] = {}
        self.aside: dict[int, tuple[int, list[Any]]] = {}
        self.salts: dict[int, str] = {}  # of those when they left
        self.known: list[tuple[str, list[int], list[Table]]] = []  # of those that left
        self.claimed = self.shared = self.swapped = self.truncated = self.calls = 0

    def admit(self, sequence: Any) -> bool:
        number = sequence.id
        self.running[number] = sequence
        for group in self.groups:
            group.tables[number] = Table()
        sequence.num_cached = 0
        if number in self.aside and self.salts[number] != sequence.settings.cache_salt:
            del self.aside[number]  # where layers have states, each entry has a new one
        if number in self.aside:
            sequence.num_cached = self._come_back(number)
        elif self.design.shares:
            sequence.num_cached = self._claim(sequence)
        return True

    def _claim(self, sequence: Any) -> int:
        """Begin with what another one, here or gone, has in its pages of the same first tokens."""
        salt, tokens = sequence.settings.cache_salt, list(sequence.tokens)
        here = [
            (
                s.settings.cache_salt,
                list(s.tokens[: s.num_cached]),
                [g.tables[s.id] for g in self.groups],
            )
            for s in self.running.values()
            if s is not sequence
        ]
        best, of = 0, None
        for other, known, tables in [*self.known, *here]:
            same = 0
            while same < min(len(tokens) - 1, len(known)) and tokens[same] == known[same]:
                same += 1
            if not self.design.partly:
                same -= same % self.page_size
            if other == salt and same > best and all(not table.first for table in tables):
                best, of = same, tables
        if of is None:
            return 0
        for group, table in zip(self.groups, of, strict=True):
            count = -(-best // self.page_size)
            group.tables[sequence.id] = Table(group.allocator.share(table.pages[:count]))
        self.claimed += best
        return best

    def preempt(self, sequence: Any) -> None:
        if self.design.swaps:
            saved = []
            for group in self.groups:
                table = group.tables[sequence.id]
                slots = group.slots(sequence.id, table.first, sequence.num_cached)
                held = {
                    layer: (pool.keys.flatten(0, 1)[slots], pool.values.flatten(0, 1)[slots])
                    for layer, pool in group.pools.items()
                    if pool.keys is not None and pool.values is not None
                }
                saved.append((table.first, held))
            self.aside[sequence.id] = (sequence.num_cached, saved)
            self.salts[sequence.id] = sequence.settings.cache_salt
        self._drop(sequence.id)
        sequence.num_cached = 0

    def _come_back(self, number: int) -> int:
        tokens, saved = self.aside.pop(number)
        self.swapped += 1
        for group, (first, held) in zip(self.groups, saved, strict=True):
            group.tables[number] = Table([], first)
            group.own(number, first, tokens)
            slots = group.slots(number, first, tokens)
            for layer, (keys, values) in held.items():
                group.pools[layer].hold(group.allocator.size, self.page_size, keys, values)
                pool: Any = group.pools[layer]
                pool.keys.flatten(0, 1)[slots] = keys
                pool.values.flatten(0, 1)[slots] = values
        return tokens

    def release(self, sequences: Any) -> None:
        for sequence in sequences:
            self.aside.pop(sequence.id, None)
            here = self.running.get(sequence.id)
            if here is not None and self.design.shares and sequence.num_cached:
                tables = [
                    Table(group.allocator.share(group.tables[sequence.id].pages),
                          group.tables[sequence.id].first)
                    for group in self.groups
                ]  # fmt: skip
                tokens = list(sequence.tokens[: sequence.num_cached])
                self.known.append((sequence.settings.cache_salt, tokens, tables))
            self._drop(sequence.id)

    def _drop(self, number: int) -> None:
        self.running.pop(number, None)
        for group in self.groups:
            group.drop(number)

    def forget(self) -> None:
        for _, _, tables in self.known:
            for group, table in zip(self.groups, tables, strict=True):
                group.allocator.give(table.pages)
        self.known = []

    def truncate(self, sequence: Any, tokens: int) -> None:
        self.truncated += 1
        if any(group.tables[sequence.id].first for group in self.groups):
            self._drop(sequence.id)
            sequence.num_cached = 0
            return
        for group in self.groups:
            group.cut(sequence.id, tokens)
        sequence.num_cached = tokens

    def fork(self, copies: Any, dropped: Any) -> None:
        for sequence in dropped:
            self._drop(sequence.id)
        for source, into in copies:
            self.running[into.id] = into
            into.num_cached = source.num_cached
            for group in self.groups:
                table = group.tables[source.id]
                pages = group.allocator.share(table.pages)
                if self.design.copies:
                    pages = [group.copied(page) for page in pages]
                group.tables[into.id] = Table(pages, table.first)

    def fits(self, step: Any) -> bool:
        """Now and then it is full, so that drafts are left out and somebody is preempted."""
        alone = len({item.sequence.members[0].id for item in step.scheduled}) == 1
        self.calls += 1
        return alone or self.calls % 9 not in (7, 8)

    def prepare(self, step: Any) -> ModelInputs:
        ids, positions, spans, last = [], [], [], []
        keep = 1 + max(len(item.drafts) for item in step.scheduled)
        for item in step.scheduled:
            end = item.start + len(item.token_ids)
            for group in self.groups:
                if self.design.moves:
                    self._move(group, item.sequence.id)
                group.own(item.sequence.id, item.start, end)
            spans.append(Span(len(ids), len(item.token_ids), end))
            ids += item.token_ids
            positions += range(item.start, end)
            last += [max(0, len(ids) - keep + i) for i in range(keep)]
        starts = [*(s.query_start for s in spans), len(ids)]
        packed = PackedStep(
            spans,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([s.kv_len for s in spans], dtype=torch.int32),
            max(s.query_len for s in spans),
            max(s.kv_len for s in spans),
        )
        numbers = [item.sequence.id for item in step.scheduled]
        self._laid = [
            (n, f.start, f.start + len(f.token_ids))
            for n, f in zip(numbers, step.scheduled, strict=True)
        ]
        for group in self.groups:
            group.now = self._tables(group, numbers, packed)
            rows = [set(row) for row in group.now.tables]
            self.shared += sum(len(row) for row in rows) - len(set().union(*rows))
        kwargs = {
            "input_ids": torch.tensor([ids]),
            "position_ids": torch.tensor([positions]),
            "use_cache": False,
            "logits_to_keep": torch.tensor(last),
        }
        return ModelInputs(kwargs, rows=len(spans), decode=step.decode)

    def _move(self, group: Group, number: int) -> None:
        table = group.tables[number]
        table.pages = [group.copied(page) for page in table.pages]

    def _tables(self, group: Group, numbers: list[int], packed: PackedStep) -> PageTables:
        own = [group.tables[number] for number in numbers]
        longest = max(len(table.pages) for table in own)
        padded = [table.pages + [0] * (longest - len(table.pages)) for table in own]
        firsts = [table.first for table in own]
        return PageTables(
            packed, group.window, self.page_size,
            torch.tensor(padded, dtype=torch.int32), torch.tensor(firsts, dtype=torch.int32),
            [list(table.pages) for table in own], firsts,
        )  # fmt: skip

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        group = self.group_of[layer]
        pool: Any = group.pools[layer]
        pool.hold(group.allocator.size, self.page_size, keys, values)
        slots = [slot for n, start, end in self._laid for slot in group.slots(n, start, end)]
        pool.keys.flatten(0, 1)[slots] = self.design.rounds(keys)
        pool.values.flatten(0, 1)[slots] = self.design.rounds(values)
        return PackedLayer(pool.keys, pool.values, group.now)

    def commit(self, step: Any, kept: Any) -> None:
        for item, count in zip(step.scheduled, kept, strict=True):
            number = item.sequence.id
            item.sequence.num_cached = cached = item.start + count
            for group in self.groups:
                group.cut(number, cached)
                if group.window is not None:
                    group.forget_before(number, cached + 1 - group.window)


def shuffled(free: list[int]) -> int:
    return random.Random(len(free) * 31 + sum(free)).choice(free)


DESIGNS: dict[str, Design] = {
    "pages from the first on": Design(),
    "pages from the last on": Design(pick=max),
    "pages in no order": Design(pick=shuffled),
    "pages of one token": Design(page_size=1, pick=shuffled),
    "pages of three tokens": Design(page_size=3, shares=True),
    "pages of 64 tokens": Design(page_size=64, shares=True, partly=True),
    "more pages than it needs": Design(spare=2),
    "tables for each layer": Design(each_layer=True, pick=shuffled),
    "one pool for all layers": Design(one_pool=True, pick=shuffled, shares=True),
    "a pool that grows by a page": Design(grows=1),
    "a pool that grows by much": Design(grows=50, pick=max),
    "forks that copy": Design(copies=True, pick=max),
    "whole pages of prefixes": Design(shares=True, pick=shuffled),
    "tokens of prefixes": Design(shares=True, partly=True),
    "prefixes, to the bit": Design(page_size=3, shares=True, partly=True, swaps=True, rounding=0.0),
    "a cache that swaps": Design(swaps=True, pick=shuffled),
    "a cache that swaps and shares": Design(swaps=True, shares=True, partly=True, each_layer=True),
    "pages that move": Design(moves=True, pick=shuffled),
    "a window that lets go of nothing": Design(keeps=True),
    "stored in bfloat16": Design(rounds=in_bfloat16, shares=True),
    "stored in two bits": Design(rounds=in_two_bits, rounding=0.7),
    "stored in eight bits": Design(rounds=in_int8, shares=True, partly=True, swaps=True),
}


class Right(Cache):
    """A stranger's backend; `made` has the caches that it bound."""

    name = "right"
    capabilities = CacheCapabilities(
        layout="packed",
        layer_types=frozenset({"full_attention", "sliding_attention"}),
        rollback=frozenset({"full_attention", "sliding_attention"}),
        forks=True,
    )

    def __init__(self, design: Design) -> None:
        self.design = design
        self.made: list[RightCache] = []

    def bind(self, context: BindContext) -> RightCache:
        self.made.append(RightCache(context.requirements.windows, self.design))
        return self.made[-1]
