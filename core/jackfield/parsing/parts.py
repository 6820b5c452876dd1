"""The parts of a model's text: content, thoughts, and tool calls as they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of the function `name`; calls are counted from 0, and `id` is the server's own."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments, which together are an object of JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """The arguments of a call are all there; not `whole`: the text breaks off in them.

    What a call that is not whole has of arguments is the beginning of JSON, and no more.
    """

    index: int
    whole: bool


Part = Content | Reasoning | CallBegun | CallArguments | CallEnded


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbouring pieces of one text as one, and none that is empty."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Content | Reasoning | CallArguments):
            if not part.text:
                continue
            last = found[-1] if found else None
            if type(last) is type(part) and replace(last, text="") == replace(part, text=""):
                found[-1] = replace(part, text=last.text + part.text)
                continue
        found.append(part)
    return found
