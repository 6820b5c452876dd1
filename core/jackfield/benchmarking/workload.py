"""What is asked in each round: prompts as token ids, so many new tokens each, when they come."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jackfield.demo import stories
from jackfield.demo.tasks import heldout
from jackfield.errors import UsageError
from jackfield.spelling import nearest

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text

Range = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """One request: token ids, how many new tokens, and seconds from the round's beginning."""

    prompt: tuple[int, ...]
    new_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """The requests of a round, `batch` of which run together at most."""

    name: str
    requests: tuple[Request, ...]
    batch: int
    seed: int = 0

    @property
    def new_tokens(self) -> int:
        return sum(one.new_tokens for one in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(one.prompt) for one in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its new ones included."""
        return max(len(one.prompt) + one.new_tokens for one in self.requests)

    @property
    def waits(self) -> bool:
        """Whether requests come one after the other, and not all at once."""
        return any(one.arrival for one in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """What it is, without the prompts; `digest` tells two workloads apart."""
        text = json.dumps([asdict(one) for one in self.requests])
        return {
            "name": self.name,
            "requests": len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "batch": self.batch,
            "arrivals": self.waits,
            "seed": self.seed,
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        }


@dataclass(frozen=True)
class Preset:
    """How many requests, tokens of a prompt and new ones from least to most, and what of."""

    requests: int
    prompt: Range
    new: Range
    text: Callable[[random.Random], Iterator[str]]


def _stories(chance: random.Random) -> Iterator[str]:
    while True:
        yield stories.story(chance, even=True).text


def _items(*tasks: str) -> Callable[[random.Random], Iterator[str]]:
    def text(chance: random.Random) -> Iterator[str]:
        while True:
            (item,) = heldout(chance.choice(tasks), 1, seed=chance.randrange(1 << 30))
            yield item.prompt

    return text


#: Each fits into a context of 512 tokens, that of the model inside the package.
PRESETS = {
    "chat": Preset(8, (32, 128), (32, 64), _stories),
    "summarize": Preset(4, (320, 440), (24, 48), _stories),
    "code": Preset(4, (64, 160), (96, 160), _items("edit", "json")),
    "maths": Preset(8, (24, 64), (96, 160), _items("arithmetic", "sort")),
}


@dataclass(frozen=True)
class Shape:
    """What is said of a preset's requests; None: as the preset has it.

    `prompt_tokens` and `new_tokens` are those of each request, `rate` is requests a second, which
    come at random; None: all at once.
    """

    requests: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    batch: int | None = None
    rate: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise UsageError for a number that is none of requests, tokens or a rate."""
        for name in ("requests", "prompt_tokens", "new_tokens", "batch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be a whole number, at least 1, not {value!r}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise UsageError(f"rate must be above 0 requests a second, not {self.rate!r}")


def preset(name: str, shape: Shape, text: Text, context: int | None) -> Workload:
    """The workload of that name, of what `text` makes of stories and questions.

    Random token ids where there is no tokenizer. Raises UsageError for a name that is none, and for
    requests longer than `context`.
    """
    shape.check()
    if name not in PRESETS:
        raise UsageError(
            f"there is no workload {name!r} (there are {', '.join(PRESETS)}, and files of prompts)"
            f"{nearest(name, PRESETS)}"
        )
    asked = PRESETS[name]
    chance = random.Random(f"{name} {shape.seed}")
    requests = []
    for _ in range(shape.requests or asked.requests):
        length = shape.prompt_tokens or chance.randint(*asked.prompt)
        new = shape.new_tokens or chance.randint(*asked.new)
        requests.append(Request(_prompt(asked, length, text, chance), new))
    return finished(name, requests, shape, context)


def _prompt(asked: Preset, length: int, text: Text, chance: random.Random) -> tuple[int, ...]:
    if text.tokenizer is None:
        return tuple(chance.randrange(text.vocab_size) for _ in range(length))
    said = asked.text(chance)
    ids: list[int] = []
    while len(ids) < length:
        ids += text.encode(f"{next(said)} ")
    return tuple(ids[:length])


def finished(name: str, requests: Sequence[Request], shape: Shape, context: int | None) -> Workload:
    """The requests with their arrivals and their batch. Raises UsageError for what is too long."""
    for number, one in enumerate(requests, 1):
        whole = len(one.prompt) + one.new_tokens
        if context is not None and whole > context:
            raise UsageError(
                f"request {number} of the workload {name} has {len(one.prompt)} tokens and asks "
                f"for {one.new_tokens} more, and the model's context is {context}; ask for fewer "
                "with --prompt-tokens or --new-tokens"
            )
    if shape.rate is not None:
        requests = _arriving(requests, shape.rate, random.Random(f"arrivals {shape.seed}"))
    return Workload(name, tuple(requests), shape.batch or len(requests), shape.seed)


def _arriving(requests: Sequence[Request], rate: float, chance: random.Random) -> Sequence[Request]:
    """The requests at the times of a Poisson process, the first one at once."""
    now, found = 0.0, []
    for one in requests:
        found.append(Request(one.prompt, one.new_tokens, now))
        now += chance.expovariate(rate)
    return found
