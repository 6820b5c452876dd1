"""Schedules and strategies held to their contracts: what a plugin gets wrong is an error."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import le
from typing import TYPE_CHECKING, NoReturn

from jackfield.bridge.source import first_line
from jackfield.contracts import Schedule, Strategy
from jackfield.errors import PluginError

if TYPE_CHECKING:
    from jackfield.sequences import Sequence


class CheckedSchedule(Schedule):
    """`inner`, called `name` in errors. The checks take a few microseconds a step."""

    def __init__(self, inner: Schedule, name: str) -> None:
        self._inner = inner
        self._name = name

    def __str__(self) -> str:
        return self._name

    def order(self, waiting: Seq[Sequence], step: int) -> list[Sequence]:
        try:
            found = self._inner.order(waiting, step)
            whole = len(found) == len(waiting) and set(found) == set(waiting)
        except Exception as error:  # noqa: BLE001 - a plugin
            self._raised("order", error)
        if not whole:
            raise PluginError(
                f"{self}: order must return all {len(waiting)} requests that wait, each once; "
                f"got {len(found)}, {len(set(found) & set(waiting))} of them among those"
            )
        return found

    def portions(
        self, running: Seq[Sequence], pending: Seq[int], budget: int, step: int
    ) -> list[int]:
        try:
            found = self._inner.portions(running, pending, budget, step)
            total = sum(found)
            right = (
                len(found) == len(pending)
                and type(total) is int
                and min(found) >= 0
                and all(map(le, found, pending))
                and 0 < total <= budget
            )
        except Exception as error:  # noqa: BLE001 - a plugin
            self._raised("portions", error)
        if not right:
            raise PluginError(
                f"{self}: portions must return {len(pending)} whole numbers from 0 to what is "
                f"pending {list(pending)}, 1 to {budget} in sum; got {found}"
            )
        return found

    def _raised(self, what: str, error: Exception) -> NoReturn:
        told = f"{type(error).__name__}: {first_line(error)}"
        raise PluginError(f"{self}: {what} raised {told}") from error


class CheckedStrategy(Strategy):
    """`inner`, called `name` in errors; its drafts are token ids below `vocab_size`."""

    def __init__(self, inner: Strategy, name: str, vocab_size: int) -> None:
        self._inner = inner
        self._name = name
        self._vocab_size = vocab_size
        self.worth = inner.worth

    def __str__(self) -> str:
        return self._name

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[list[int]]:
        try:
            found = self._inner.propose(sequences, most)
            right = len(found) == len(sequences) and all(
                len(drafts) <= room and all(map(self._is_token, drafts))
                for drafts, room in zip(found, most, strict=True)
            )
        except Exception as error:
            told = f"{type(error).__name__}: {first_line(error)}"
            raise PluginError(f"{self}: propose raised {told}") from error
        if not right:
            raise PluginError(
                f"{self}: propose must return {len(sequences)} lists of at most {list(most)} token "
                f"ids from 0 to {self._vocab_size - 1}; got {found}"
            )
        return found

    def refuse(self, prompt_length: int) -> str | None:
        return self._inner.refuse(prompt_length)

    def _is_token(self, token: object) -> bool:
        return type(token) is int and 0 <= token < self._vocab_size

    def release(self, sequences: Seq[Sequence]) -> None:
        self._inner.release(sequences)
