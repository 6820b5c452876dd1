"""A server measured: looked at once, then warmed up and put under each load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from jackfield.client.figures import Bounds, Figures, figures
from jackfield.client.load import Arrivals, run
from jackfield.client.prompts import Prompts
from jackfield.client.talking import Talk
from jackfield.client.wire import Wires

CHAT, TEXT = "/chat/completions", "/completions"
FIRST = 1_000_000_000  # the number of a prompt of the warm-up, which no request has


@dataclass(frozen=True)
class Target:
    """An endpoint of a server's model."""

    talk: Talk
    path: str

    def own(self, prompt: str) -> dict[str, Any]:
        if self.path == TEXT:
            return {"prompt": prompt}
        return {"messages": [{"role": "user", "content": prompt}]}

    def prompt_tokens(self, prompt: str) -> int | None:
        """How many tokens the server counts; None where it does not say.

        Raises what `Talk.pieces` raises, in words: a server that cannot be measured is found out
        here.
        """
        found = None
        with closing(self.talk.pieces(self.path, self.own(prompt))) as pieces:
            for piece in pieces:
                found = (piece.usage or {}).get("prompt_tokens", found)
        return found

    def body(self, prompt: str) -> bytes:
        return json.dumps(self.talk.body(self.own(prompt))).encode()


def measure(
    target: Target,
    prompts: Prompts,
    loads: Sequence[Arrivals],
    bounds: Bounds,
    warm_up: int,
    timeout: float,
) -> Iterator[Figures]:
    """The figures of each load, one after the other, each after `warm_up` requests of its own.

    No two loads have the same prompts.
    """
    before = 0
    for load in loads:
        found = asyncio.run(_measured(target, prompts, load, bounds, warm_up, timeout, before))
        before += found.requests
        yield found


async def _measured(
    target: Target,
    prompts: Prompts,
    load: Arrivals,
    bounds: Bounds,
    warm_up: int,
    timeout: float,
    before: int,
) -> Figures:
    def numbered(first: int) -> Callable[[int], bytes]:
        return lambda number: target.body(prompts(first + number))

    with closing(Wires(target.talk.address, target.path, timeout)) as wires:
        if warm_up:
            together = min(warm_up, load.concurrency or 8)
            await run(wires, Arrivals(together, None, warm_up, None), numbered(FIRST + before))
        return figures(await run(wires, load, numbered(before)), bounds)


def described(target: Target) -> Mapping[str, Any]:
    return {"url": target.talk.address.base, "endpoint": target.path, "model": target.talk.model}
