"""Packed caches that are wrong in one way: each a right design of a stranger, with one thing lost.

What is changed is what an honest author gets wrong: who owns a page, what is found again, what is
copied, what is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from right_caches import Allocator, Design, Right, RightCache, Table, shuffled

from jackfield.contracts import BindContext, CacheCapabilities

PAGE = Design(page_size=4, pick=shuffled)
RICH = Design(page_size=3, pick=shuffled, shares=True, partly=True, swaps=True, grows=5)


def of(base: type[RightCache], design: Design = PAGE, **declared: Any) -> Callable[[], Right]:
    """A backend whose caches are of the class `base`."""

    class Wrong(Right):
        name = "wrong"
        capabilities = replace(Right.capabilities, **declared)

        def bind(self, context: BindContext) -> RightCache:
            return base(context.requirements.windows, self.design)

    return lambda: Wrong(design)


class ForksWithoutCopying(RightCache):
    """Both write on the page that they share."""

    def fork(self, copies: Any, dropped: Any) -> None:
        super().fork(copies, dropped)
        for group in self.groups:
            group.allocator.users = dict.fromkeys(group.allocator.users, 1)


class ForksWholePages(RightCache):
    """The page that is half full is a new one, with nothing in it."""

    def fork(self, copies: Any, dropped: Any) -> None:
        super().fork(copies, dropped)
        for _, into in copies:
            for group in self.groups:
                table = group.tables[into.id]
                if into.num_cached % self.page_size:
                    group.allocator.give(table.pages[-1:])
                    table.pages[-1] = group.allocator.take()


class ForksToTheFirst(RightCache):
    """All copies continue the first source."""

    def fork(self, copies: Any, dropped: Any) -> None:
        super().fork(copies, dropped)
        for _, into in copies:
            for group in self.groups:
                first = group.tables[copies[0][0].id]
                group.tables[into.id] = Table(group.allocator.share(first.pages), first.first)


class ForksWithOwnWindow(RightCache):
    """The copy's pages are counted from token 0, where a window let go of the first ones."""

    def fork(self, copies: Any, dropped: Any) -> None:
        super().fork(copies, dropped)
        for _, into in copies:
            for group in self.groups:
                group.tables[into.id].first = 0


class KeepsTheDropped(RightCache):
    """`dropped` of a fork hold their pages for ever."""

    def fork(self, copies: Any, dropped: Any) -> None:
        super().fork(copies, [])


class NeverGivesBack(RightCache):
    def _drop(self, number: int) -> None:
        self.running.pop(number, None)
        for group in self.groups:
            group.tables.pop(number, None)


class GivesBackTwice(RightCache):
    """Pages of who leaves are free twice, so that two get them."""

    def _drop(self, number: int) -> None:
        own = [list(g.tables[number].pages) if number in g.tables else [] for g in self.groups]
        super()._drop(number)
        for group, pages in zip(self.groups, own, strict=True):
            group.allocator.free += [p for p in pages if p not in group.allocator.users]


class GivesBackShared(RightCache):
    """Pages are free as soon as one of those that share them has left."""

    def _drop(self, number: int) -> None:
        for group in self.groups:
            for page in group.tables[number].pages if number in group.tables else ():
                group.allocator.users[page] = 1
        super()._drop(number)


class PreemptsWithoutGiving(RightCache):
    def preempt(self, sequence: Any) -> None:
        sequence.num_cached = 0


class PreemptsWithoutSaying(RightCache):
    """`num_cached` stays as it was."""

    def preempt(self, sequence: Any) -> None:
        held = sequence.num_cached
        super().preempt(sequence)
        sequence.num_cached = held


class ComesBackWithoutValues(RightCache):
    def _come_back(self, number: int) -> int:
        _, saved = self.aside[number]
        for _, held in saved:
            for layer, (keys, values) in held.items():
                held[layer] = (keys, torch.zeros_like(values))
        return super()._come_back(number)


class ComesBackInAnotherOrder(RightCache):
    def _come_back(self, number: int) -> int:
        _, saved = self.aside[number]
        for _, held in saved:
            for layer, (keys, values) in held.items():
                held[layer] = (keys.flip(0), values.flip(0))
        return super()._come_back(number)


class ComesBackOneShort(RightCache):
    """Says that a token more is there than was swapped out."""

    def preempt(self, sequence: Any) -> None:
        super().preempt(sequence)
        tokens, saved = self.aside[sequence.id]
        self.aside[sequence.id] = (min(tokens + 1, len(sequence.tokens) - 1), saved)

    def _come_back(self, number: int) -> int:
        tokens, saved = self.aside[number]
        for _, held in saved:
            for layer, (keys, values) in held.items():
                more = tokens - len(keys)
                if more > 0:
                    held[layer] = (
                        torch.cat([keys, keys[-1:].expand(more, -1, -1)]),
                        torch.cat([values, values[-1:].expand(more, -1, -1)]),
                    )
        return super()._come_back(number)


class KeepsWhatWasCancelled(RightCache):
    """Who leaves while it is swapped out is kept aside for ever, and found by its number."""

    def release(self, sequences: Any) -> None:
        aside = dict(self.aside)
        super().release(sequences)
        self.aside = aside


class SharesOverSalts(RightCache):
    def _claim(self, sequence: Any) -> int:
        salt = sequence.settings.cache_salt
        self.known = [(salt, tokens, tables) for _, tokens, tables in self.known]
        return super()._claim(sequence)


class SharesAfterForget(RightCache):
    def forget(self) -> None:
        return


class SharesByLastPage(RightCache):
    """A page is found by its own tokens, whatever came before it."""

    def _claim(self, sequence: Any) -> int:
        size = self.page_size
        for salt, tokens, tables in self.known:
            if salt != sequence.settings.cache_salt or any(t.first for t in tables):
                continue
            for at in range(0, min(len(tokens), len(sequence.tokens) - 1) - size + 1, size):
                same = tokens[at : at + size] == list(sequence.tokens[at : at + size])
                if same and (at or tokens[:size] == list(sequence.tokens[:size])):
                    for group, table in zip(self.groups, tables, strict=True):
                        own = group.allocator.share(table.pages[: at // size + 1])
                        group.drop(sequence.id)
                        group.tables[sequence.id] = Table(own)
                    return at + size
        return 0


class SharesOneMore(RightCache):
    """Claims the first token that is not the same any more."""

    def _claim(self, sequence: Any) -> int:
        found = super()._claim(sequence)
        more = found and found + 1 < len(sequence.tokens) and found % self.page_size
        return found + 1 if more else found


class SharesWithoutCopying(RightCache):
    """Writes behind a prefix on the very page that another one has."""

    def _claim(self, sequence: Any) -> int:
        found = super()._claim(sequence)
        for group in self.groups:
            for page in group.tables[sequence.id].pages:
                group.allocator.users[page] = 1
        return found


class SharesWhatWasRejected(RightCache):
    """What is kept of who leaves has one token more than it has cached."""

    def release(self, sequences: Any) -> None:
        for sequence in sequences:
            if sequence.id in self.running and sequence.num_cached:
                sequence.num_cached = len(sequence.tokens)
        super().release(sequences)


class SharesWindowsFromZero(RightCache):
    """Prefixes are claimed where a window has let go of their first pages."""

    def release(self, sequences: Any) -> None:
        for sequence in sequences:
            for group in self.groups:
                if sequence.id in group.tables:
                    group.tables[sequence.id].first = 0
        super().release(sequences)


class LetsGoEarly(RightCache):
    """A window's first page goes one token too early."""

    def commit(self, step: Any, kept: Any) -> None:
        super().commit(step, kept)
        for item, count in zip(step.scheduled, kept, strict=True):
            for group in self.groups:
                if group.window is not None:
                    oldest = item.start + count + 1 - group.window
                    group.forget_before(item.sequence.id, oldest + self.page_size - 1)


class LetsGoWithoutSaying(RightCache):
    """The first page of a window goes, and `first` stays."""

    def commit(self, step: Any, kept: Any) -> None:
        before = {(id(g), n): t.first for g in self.groups for n, t in g.tables.items()}
        super().commit(step, kept)
        for group in self.groups:
            for number, table in group.tables.items():
                table.first = before.get((id(group), number), 0)


class LetsGoOfFullLayers(RightCache):
    """Layers that see everything are cut to the smallest window."""

    def commit(self, step: Any, kept: Any) -> None:
        super().commit(step, kept)
        least = min((g.window for g in self.groups if g.window is not None), default=16)
        for item, count in zip(step.scheduled, kept, strict=True):
            for group in self.groups:
                group.forget_before(item.sequence.id, item.start + count + 1 - least)


class KeepsRejected(RightCache):
    """What was rejected counts as there, so that tokens behind it lie one place late."""

    def commit(self, step: Any, kept: Any) -> None:
        super().commit(step, [i.num_tokens + len(i.drafts) for i in step.scheduled])


class TakesBackPages(RightCache):
    """Rejected drafts take the page with them that kept tokens are on."""

    def commit(self, step: Any, kept: Any) -> None:
        super().commit(step, kept)
        for item, count in zip(step.scheduled, kept, strict=True):
            if count < item.num_tokens + len(item.drafts):
                for group in self.groups:
                    table = group.tables[item.sequence.id]
                    if table.pages:
                        group.allocator.give(table.pages[-1:])
                        table.pages[-1] = group.allocator.take()


class TruncatesTooMuch(RightCache):
    """Gives back the page of the last token that stays."""

    def truncate(self, sequence: Any, tokens: int) -> None:
        super().truncate(sequence, tokens)
        for group in self.groups:
            table = group.tables.get(sequence.id)
            if table is not None and table.pages and sequence.num_cached:
                group.allocator.give([table.pages[-1]])
                table.pages[-1] = group.allocator.take()


class TruncatesInName(RightCache):
    def truncate(self, sequence: Any, tokens: int) -> None:
        sequence.num_cached = tokens + 1


class FindsFromPrepare(RightCache):
    """What a step is given can be found before it was written: also where the step fails."""

    def prepare(self, step: Any) -> Any:
        found = super().prepare(step)
        self.ends = {item.sequence.id: item.start + item.num_tokens for item in step.scheduled}
        return found

    def commit(self, step: Any, kept: Any) -> None:
        self.ends = {}
        super().commit(step, kept)

    def release(self, sequences: Any) -> None:
        for sequence in sequences:
            if sequence.id in self.running and sequence.id in getattr(self, "ends", ()):
                sequence.num_cached = self.ends[sequence.id]
        super().release(sequences)


class TruncatesForOthers(RightCache):
    """What is left of a text that became another one is written to, whoever finds it."""

    def truncate(self, sequence: Any, tokens: int) -> None:
        super().truncate(sequence, tokens)
        for group in self.groups:
            table = group.tables.get(sequence.id)
            for page in () if table is None else table.pages:
                group.allocator.users[page] = 1


class EvictsInName(RightCache):
    """Pages of the oldest texts are free again, and can still be found."""

    def release(self, sequences: Any) -> None:
        super().release(sequences)
        gone = getattr(self, "gone", 0)
        if len(self.known) > 4 + gone:
            for group, table in zip(self.groups, self.known[gone][2], strict=True):
                for page in table.pages:
                    if group.allocator.users.pop(page, 0):
                        group.allocator.free.append(page)
            self.gone = gone + 1


class KeepsTheStates(RightCache):
    """Pages of one step are the model's own tensors, which it uses again."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        found = super().write(layer, keys, values)
        lone = len(self._laid) == 1 and self._laid[0][1] == 0
        if lone and len(keys) == self.page_size:
            found.replace(keys[None], values[None])
            for tables in (found.tables,):
                tables.tables, tables.block_table = [[0]], tables.block_table * 0
                tables.__post_init__()
        return found


class ScalesInPlace(RightCache):
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        found = super().write(layer, keys, values)
        keys.mul_(1.0001)
        return found


class StoresScaled(RightCache):
    """Off by less than may be, but all of it in one direction."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return super().write(layer, keys * 1.1, values)


class StoresHalf(RightCache):
    """In float16, and says that it rounds nothing."""

    rounding = 0.0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return super().write(layer, keys.half().to(keys.dtype), values)


class StoresOnlyNewKeys(RightCache):
    """Values of prompts are not stored."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return super().write(layer, keys, values if len(values) < 9 else values * 0)


class StoresByPosition(RightCache):
    """Sequences have the slots of their positions, whoever they are."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        found = super().write(layer, keys, values)
        at = 0
        for _, start, end in self._laid:
            for position in range(start, end):
                found.flat_keys[position % len(found.flat_keys)] = keys[at]
                at += 1
        return found


class StoresOneRowLate(RightCache):
    """Each sequence's first token in a step is that of the one before it."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return super().write(layer, keys if len(self._laid) == 1 else keys.roll(1, 0), values)


class StoresHeadsMixed(RightCache):
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        mixed = keys.transpose(1, 2).reshape(keys.shape)
        return super().write(layer, mixed, values)


class LayersTogether(RightCache):
    """All layers of a window have one pool, with the same pages."""

    def __init__(self, windows: Any, design: Design) -> None:
        super().__init__(windows, design)
        for group in self.groups:
            one = next(iter(group.pools.values()))
            group.pools = dict.fromkeys(group.pools, one)


class LosesOnGrowing(RightCache):
    """A pool that grows begins anew."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        pool = self.group_of[layer].pools[layer]
        size = self.group_of[layer].allocator.size
        if pool.keys is not None and len(pool.keys) < size:
            pool.keys = pool.values = None
        return super().write(layer, keys, values)


class GrowsByKeys(RightCache):
    """Values are not copied when a pool grows."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        pool = self.group_of[layer].pools[layer]
        size = self.group_of[layer].allocator.size
        if pool.values is not None and len(pool.values) < size:
            pool.values = None
        return super().write(layer, keys, values)


class ForgetsFailedSteps(RightCache):
    """Who was in a step that failed is never let go of."""

    def prepare(self, step: Any) -> Any:
        found = super().prepare(step)
        self.open = {item.sequence.id for item in step.scheduled}
        return found

    def commit(self, step: Any, kept: Any) -> None:
        self.open = set()
        super().commit(step, kept)

    def release(self, sequences: Any) -> None:
        super().release([s for s in sequences if s.id not in getattr(self, "open", ())])
        for sequence in sequences:
            self.running.pop(sequence.id, None)


class AsksForMore(RightCache):
    """`refuse` lets in what `admit` never takes."""

    def admit(self, sequence: Any) -> bool:
        return len(sequence.tokens) <= 30 and super().admit(sequence)


class SeesNoRoom(RightCache):
    """Says for ever that the only request does not fit, once it is long."""

    def fits(self, step: Any) -> bool:
        return all(item.start < 30 for item in step.scheduled)


class CloseKeepsAll(RightCache):
    """Pools of a fixed size, taken at once, which outlive `close`."""

    def __init__(self, windows: Any, design: Design) -> None:
        super().__init__(windows, design)
        self.room = torch.zeros(1 << 20)

    def close(self) -> None:
        self.groups.clear()


class HoldsNothing(RightCache):
    def held_bytes(self) -> int:
        return 0


class HoldsForEver(RightCache):
    def held_bytes(self) -> int:
        return 4096 * (1 + self.calls)


class Remembers(RightCache):
    """Keeps the keys of every step, for nothing."""

    def __init__(self, windows: Any, design: Design) -> None:
        super().__init__(windows, design)
        self.kept: list[Any] = []

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        self.kept.append(keys.clone())
        return super().write(layer, keys, values)


class TakesFromTheUsed(Allocator):
    """Hands out a page that another has, once many are in use."""

    def take(self) -> int:
        if len(self.users) > 6:
            return min(self.users)
        return super().take()


class Crowded(RightCache):
    def __init__(self, windows: Any, design: Design) -> None:
        super().__init__(windows, design)
        for group in self.groups:
            group.allocator = TakesFromTheUsed(design)


class OfTheClass(RightCache):
    """What is shared lies in the class: two engines find each other's."""

    everybody: ClassVar[list[Any]] = []

    def __init__(self, windows: Any, design: Design) -> None:
        super().__init__(windows, design)
        pools = OfTheClass.everybody
        if not pools:
            pools += [(g.pools, g.allocator) for g in self.groups]
        for group, (own, allocator) in zip(self.groups, pools, strict=False):
            if own.keys() == group.pools.keys():
                group.pools = own
                del allocator


class OffByOneWindow(RightCache):
    """Tells attentions a window that is one wider, and keeps pages for it."""

    def __init__(self, windows: Any, design: Design) -> None:
        super().__init__(tuple(w and w + 1 for w in windows), design)


#: fault -> (the cache, its design, what the verdict says)
PAGES: dict[str, tuple[type[RightCache], Design, str]] = {
    "forks without copying": (ForksWithoutCopying, PAGE, r"request \d+|page"),
    "forks whole pages": (ForksWholePages, PAGE, r"NaN|0: they|not what|token|not in its pages"),
    "forks to the first": (ForksToTheFirst, PAGE, r"request|page"),
    "forks windows from token 0": (ForksWithOwnWindow, PAGE, r"page|token|first"),
    "keeps who was dropped": (KeepsTheDropped, replace(PAGE, grows=2), r"more after|held|bytes"),
    "never gives back": (NeverGivesBack, replace(PAGE, grows=2), r"bytes|held"),
    "gives back twice": (GivesBackTwice, PAGE, r"page|request"),
    "gives back what is shared": (GivesBackShared, RICH, r"page|request|KeyError"),
    "preempts without giving back": (PreemptsWithoutGiving, PAGE, r"page|request|bytes|held"),
    "preempts without saying": (PreemptsWithoutSaying, PAGE, r"preempt"),
    "comes back without values": (ComesBackWithoutValues, RICH, r"values .* are 0|not in its"),
    "comes back in another order": (ComesBackInAnotherOrder, RICH, r"those of token"),
    "comes back one short": (ComesBackOneShort, RICH, r"those of token|not in its|raised|admit"),
    "keeps what was cancelled": (KeepsWhatWasCancelled, RICH, r"bytes|held"),
    "shares over salts": (SharesOverSalts, RICH, r"cache_salt|never given"),
    "shares after forget": (SharesAfterForget, RICH, r"forget|never given"),
    "shares by the last page": (SharesByLastPage, RICH, r"never given|those of"),
    "shares one more": (SharesOneMore, RICH, r"never given|request"),
    "shares without copying": (SharesWithoutCopying, RICH, r"request|page"),
    "shares what was rejected": (SharesWhatWasRejected, RICH, r"num_cached|never given|changed"),
    "shares windows from token 0": (SharesWindowsFromZero, RICH, r"token|page|request"),
    "lets go early": (LetsGoEarly, PAGE, r"see"),
    "lets go without saying": (LetsGoWithoutSaying, PAGE, r"token|page"),
    "lets go of full layers": (LetsGoOfFullLayers, PAGE, r"see|token"),
    "keeps what was rejected": (KeepsRejected, PAGE, r"commit|num_cached"),
    "takes back pages": (TakesBackPages, PAGE, r"token|page|NaN|never"),
    "truncates too much": (TruncatesTooMuch, PAGE, r"token|page|NaN|never"),
    "truncates in name": (TruncatesInName, PAGE, r"truncate"),
    "finds from prepare on": (FindsFromPrepare, RICH, r"never given|num_cached|changed"),
    "truncates for others": (TruncatesForOthers, RICH, r"request|page|KeyError|token"),
    "evicts in name": (EvictsInName, RICH, r"request|page|KeyError"),
    "keeps the model's tensors": (KeepsTheStates, PAGE, r"NaN"),
    "scales in place": (ScalesInPlace, PAGE, r"write changed"),
    "stores scaled": (StoresScaled, PAGE, r"1\.\d+ times"),
    "stores half and says exact": (StoresHalf, PAGE, r"not what was written|not in its|times"),
    "stores no values of prompts": (StoresOnlyNewKeys, PAGE, r"values .* are 0|not in its"),
    "stores by position": (StoresByPosition, PAGE, r"request|token"),
    "stores one row late": (StoresOneRowLate, PAGE, r"request"),
    "stores heads mixed": (StoresHeadsMixed, PAGE, r"not what was written|not in its"),
    "layers in one pool": (LayersTogether, PAGE, r"layer"),
    "loses on growing": (LosesOnGrowing, replace(PAGE, grows=2), r"token|not in its"),
    "grows by keys": (GrowsByKeys, replace(PAGE, grows=2), r"values"),
    "keeps failed steps": (ForgetsFailedSteps, replace(PAGE, grows=2), r"bytes|more after|held"),
    "never admits what it let in": (AsksForMore, PAGE, r"admit"),
    "sees no room for one": (SeesNoRoom, PAGE, r"fits"),
    "close keeps all": (CloseKeepsAll, PAGE, r"close"),
    "holds nothing": (HoldsNothing, PAGE, r"held_bytes"),
    "holds for ever": (HoldsForEver, PAGE, r"nobody runs|held_bytes|holds"),
    "remembers every step": (Remembers, PAGE, r"more after"),
    "crowded": (Crowded, PAGE, r"page|request|KeyError"),
    "pools of the class": (OfTheClass, PAGE, r"request|token|engine|off by|page|layer"),
    "a window one wider": (OffByOneWindow, PAGE, r"window"),
}


class NoRefusals(Right):
    """Accepts everything: what it declares is not looked at."""

    name = "wrong"
    capabilities = CacheCapabilities(layout="packed", layer_types=frozenset({"full_attention"}))

    def refuse(self, requirements: Any, options: Any) -> list[str]:
        return []


def promising(share: float) -> Callable[[], Right]:
    """`request_bytes` and `allocated_bytes` times `share`."""

    class Promises(Right):
        name = "wrong"

        def request_bytes(self, requirements: Any, options: Any, tokens: int) -> int | None:
            found = super().request_bytes(requirements, options, tokens)
            return found and int(share * found)

    return lambda: Promises(PAGE)
