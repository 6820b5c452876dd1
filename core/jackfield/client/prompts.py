"""Prompts to measure with: different ones, so that nothing that is cached answers them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jackfield.demo import stories
from jackfield.errors import UsageError, shown

Prompts = Callable[[int], str]
"""The prompt of each request, by its number."""


@dataclass(frozen=True)
class Beginnings:
    """The first two sentences of stories, which go on."""

    seed: int

    def __call__(self, number: int) -> str:
        told = stories.story(random.Random(f"{self.seed}:{number}"), even=True).text
        return ". ".join(told.split(". ")[:2]) + "."


@dataclass(frozen=True)
class Words:
    """So many words of sentences that have nothing to do with one another."""

    seed: int
    count: int

    def __call__(self, number: int) -> str:
        text = stories.sentences(random.Random(f"{self.seed}:{number}"), self.count // 4 + 1)
        return " ".join(text.split()[: self.count])


@dataclass(frozen=True)
class Lines:
    """Prompts that somebody wrote, one after the other and then again."""

    lines: tuple[str, ...]

    def __call__(self, number: int) -> str:
        return self.lines[number % len(self.lines)]


def of_file(file: Path) -> Lines:
    """The lines of a file that are not empty. Raises UsageError."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {shown(file)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text; convert it") from None
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise UsageError(f"{file} has no prompts; write one a line")
    return Lines(lines)


def words_for(tokens: int, counted: Callable[[str], int | None], seed: int) -> Words:
    """As many words as have about `tokens` tokens where `counted` says how many a prompt has.

    Raises UsageError where it cannot be known, and where the least prompt has more.
    """
    few, many = 32, 96  # two, since a chat template adds its own
    at_few, at_many = counted(Words(seed, few)(-1)), counted(Words(seed, many)(-2))
    if at_few is None or at_many is None or at_many <= at_few:
        raise UsageError(
            "--prompt-tokens: the server does not say how many tokens a prompt has; give a file of "
            "prompts with --prompts"
        )
    per_word = (at_many - at_few) / (many - few)
    count = round(few + (tokens - at_few) / per_word)
    if count < 1:
        least = round(at_few - (few - 1) * per_word)
        raise UsageError(f"--prompt-tokens {tokens}: the least prompt here has about {least}")
    return Words(seed, count)
