"""Which replica a prompt goes to: where its beginning was lately sent, unless others idle."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

BLOCK = 64  # characters; a page of most caches is 16 tokens, which are about as many
MOST = 512 * BLOCK  # of a prompt; where two are alike for so long, the rest decides nothing
_APART = 8  # beginnings that are remembered are an eighth longer each: thirty of 7,000 characters
_LOOKED_AT = 32  # replicas, where there are more
_HOLDERS = 4  # replicas that are remembered for a block

#: Fields of a body in the order in which what they say stands in a prompt.
_FIELDS = (
    "model", "adapter", "cache_salt", "prompt_cache_key", "chat_template_kwargs", "tools",
    "previous_response_id", "instructions", "messages", "prompt", "input",
)  # fmt: skip


def blocks(owner: str, body: Mapping[str, Any]) -> tuple[int, ...]:
    """What stands for the beginnings of a body's prompt, the shortest first.

    Each is the hash of one, and means something in this process alone. `owner` is whose key it
    came with: nothing that is cached is shared among keys.
    """
    told = [[field, body[field]] for field in _FIELDS if body.get(field) is not None]
    text = json.dumps([owner, *told], ensure_ascii=False, separators=(",", ":"))
    found: list[int] = []
    last = begin = 0
    for end in ends(min(len(text), MOST)):
        last = hash((last, text[begin:end]))
        found.append(last)
        begin = end
    return tuple(found)


def ends(length: int, block: int = BLOCK) -> Iterator[int]:
    """Where the beginnings of so many characters end: after each block, then ever further apart."""
    number = 1
    while number * block <= length:
        yield number * block
        number += max(1, number // _APART)


class Prefixes:
    """Remembers where the beginnings of prompts were sent, up to `capacity` blocks of them.

    No replica is chosen that has more than `slack` requests more than the one with the fewest, and
    more than `factor` times as many.
    """

    def __init__(self, capacity: int = 262_144, slack: int = 8, factor: float = 1.5) -> None:
        self._capacity, self._slack, self._factor = capacity, slack, factor
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # the latest use last
        self._used: dict[str, int] = {}  # when a replica was chosen last
        self._count = 0
        self._draw = random.Random(0)

    def __len__(self) -> int:
        return len(self._holders)

    def most(self, loads: Mapping[str, int]) -> float:
        """How many open requests a replica may have and still be chosen for what it has read."""
        least = min(loads.values())
        return max(least + self._slack, least * self._factor)

    def choose(self, blocks: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """The replicas of `loads` (open requests by name), the best first, which is remembered.

        That is the one that has read the longest beginning, among several the one with the fewest
        requests, then the one that was not chosen for the longest time. Of the others follow those
        with the fewest requests, in case it takes none: of all, or of some that are drawn.
        """
        most, by_load = self.most(loads), self._place(loads)
        best = self._reader(blocks, loads, most) or min(_fewest(loads), key=by_load)
        names = loads if len(loads) <= _LOOKED_AT else self._draw.sample(tuple(loads), _LOOKED_AT)
        rest = sorted((name for name in names if name != best), key=by_load)
        self._remember(blocks, best, loads)
        return [best, *rest]

    def _place(self, loads: Mapping[str, int]) -> Callable[[str], tuple[int, int]]:
        return lambda name: (loads[name], self._used.get(name, -1))

    def _reader(self, blocks: Sequence[int], loads: Mapping[str, int], most: float) -> str | None:
        """Who has read the longest beginning, of those that may be chosen."""
        for block in reversed(blocks):
            there = [n for n in self._holders.get(block, ()) if loads.get(n, most + 1) <= most]
            if there:
                return min(there, key=self._place(loads))
        return None

    def _remember(self, blocks: Sequence[int], name: str, there: Iterable[str]) -> None:
        self._count += 1
        self._used[name] = self._count
        if len(self._used) > 2 * len(alive := set(there)):
            self._used = {n: used for n, used in self._used.items() if n in alive}
        for block in reversed(blocks):  # the shortest last, so that it is kept the longest
            others = (n for n in self._holders.pop(block, ()) if n != name)
            self._holders[block] = (name, *_first(others, _HOLDERS - 1))
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)


def _fewest(loads: Mapping[str, int]) -> Iterator[str]:
    least = min(loads.values())
    return (name for name, load in loads.items() if load == least)


def _first(names: Iterator[str], count: int) -> tuple[str, ...]:
    return tuple(name for name, _ in zip(names, range(count), strict=False))


class OpenRequests:
    """Which requests each replica has, as they were handed out here."""

    def __init__(self) -> None:
        self._place: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def loads(self, names: Iterable[str]) -> dict[str, int]:
        return {name: self._counts.get(name, 0) for name in names}

    def begin(self, request: str, name: str) -> None:
        """The request goes to `name`, and nowhere else that it may have gone to before."""
        if (before := self._place.get(request)) is not None:
            self.end(request, before)
        self._place[request] = name
        self._counts[name] = self._counts.get(name, 0) + 1

    def end(self, request: str, name: str) -> None:
        """It is over there; nothing, where it has gone on to another."""
        if self._place.get(request) != name:
            return
        del self._place[request]
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]
