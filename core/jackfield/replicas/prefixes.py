"""Which replica a prompt goes to: where its beginning was lately sent, unless others idle."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

BLOCK = 64  # characters; a page of most caches is 16 tokens, which are about as many
MOST_BLOCKS = 512  # of a prompt; where two are alike for so long, the rest decides nothing
_HOLDERS = 4  # replicas that are remembered for a block

#: Fields of a body in the order in which what they say stands in a prompt.
_FIELDS = (
    "model", "cache_salt", "prompt_cache_key", "chat_template_kwargs", "tools",
    "previous_response_id", "instructions", "messages", "prompt", "input",
)  # fmt: skip


def blocks(owner: str, body: Mapping[str, Any]) -> tuple[int, ...]:
    """What stands for the beginnings of a body's prompt, the shortest first.

    Each is a hash of one block more, and means something in this process alone. `owner` is whose
    key it came with: nothing that is cached is shared among keys.
    """
    told = [[field, body[field]] for field in _FIELDS if body.get(field) is not None]
    text = json.dumps([owner, *told], ensure_ascii=False, separators=(",", ":"))
    found: list[int] = []
    last = 0
    for at in range(0, min(len(text) - BLOCK + 1, BLOCK * MOST_BLOCKS), BLOCK):
        last = hash((last, text[at : at + BLOCK]))
        found.append(last)
    return tuple(found)


class Prefixes:
    """Remembers where the beginnings of prompts were sent, up to `capacity` blocks of them.

    No replica is chosen that has more than `slack` requests more than the one with the fewest, and
    more than `factor` times as many.
    """

    def __init__(self, capacity: int = 65_536, slack: int = 8, factor: float = 1.5) -> None:
        self._capacity, self._slack, self._factor = capacity, slack, factor
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # the latest use last
        self._used: dict[str, int] = {}  # when a replica was chosen last
        self._count = 0

    def __len__(self) -> int:
        return len(self._holders)

    def most(self, loads: Mapping[str, int]) -> float:
        """How many open requests a replica may have and still be chosen for what it has read."""
        least = min(loads.values())
        return max(least + self._slack, least * self._factor)

    def choose(self, blocks: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """The replicas of `loads` (open requests by name), the best first, which is remembered.

        That is the one that has read the longest beginning, among several the one with the fewest
        requests, then the one that was not chosen for the longest time. The others follow by their
        requests, in case it takes none.
        """
        rest = sorted(loads, key=lambda name: (loads[name], self._used.get(name, -1)))
        most = self.most(loads)
        free = {name: place for place, name in enumerate(rest) if loads[name] <= most}
        holders = (free.keys() & self._holders.get(block, ()) for block in reversed(blocks))
        found = next(filter(None, holders), None)
        best = min(found, key=free.__getitem__) if found else rest[0]
        self._remember(blocks, best, loads)
        return [best, *(name for name in rest if name != best)]

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
