"""Schedules and strategies held to their contracts: what a plugin gets wrong is an error."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import le
from typing import TYPE_CHECKING

from jackfield.choosing.guarded import fault, guarded, shown
from jackfield.contracts import Decision, Schedule, Search, Strategy

if TYPE_CHECKING:
    import torch

    from jackfield.asking.settings import Settings
    from jackfield.running.groups import Group
    from jackfield.running.sequences import Sequence


class CheckedSchedule(Schedule):
    """`inner`, called `name` in errors. The checks take a few microseconds a step."""

    def __init__(self, inner: Schedule, name: str) -> None:
        self._inner = inner
        self._name = name

    def __str__(self) -> str:
        return self._name

    def order(self, waiting: Seq[Sequence], step: int) -> list[Sequence]:
        with guarded(self, "order"):
            found = self._inner.order(waiting, step)
            whole = len(found) == len(waiting) and set(found) == set(waiting)
        if not whole:
            raise fault(
                self,
                f"order must return all {len(waiting)} requests that wait, each once; "
                f"got {len(found)}, {len(set(found) & set(waiting))} of them among those",
            )
        return found

    def portions(
        self, running: Seq[Sequence], pending: Seq[int], budget: int, step: int
    ) -> list[int]:
        with guarded(self, "portions"):
            found = self._inner.portions(running, pending, budget, step)
            total = sum(found)
            right = (
                len(found) == len(pending)
                and type(total) is int
                and min(found) >= 0
                and all(map(le, found, pending))
                and 0 < total <= budget
            )
        if not right:
            raise fault(
                self,
                f"portions must return {len(pending)} whole numbers from 0 to what is "
                f"pending {list(pending)}, 1 to {budget} in sum; got {shown(found)}",
            )
        return found


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
        with guarded(self, "propose"):
            found = self._inner.propose(sequences, most)
            right = len(found) == len(sequences) and all(
                len(drafts) <= room and all(map(self._is_token, drafts))
                for drafts, room in zip(found, most, strict=True)
            )
        if not right:
            raise fault(
                self,
                f"propose must return {len(sequences)} lists of at most {list(most)} token "
                f"ids from 0 to {self._vocab_size - 1}; got {shown(found)}",
            )
        return found

    def refuse(self, prompt_length: int) -> str | None:
        with guarded(self, "refuse"):
            return self._inner.refuse(prompt_length)

    def _is_token(self, token: object) -> bool:
        return type(token) is int and 0 <= token < self._vocab_size

    def release(self, sequences: Seq[Sequence]) -> None:
        with guarded(self, "release"):
            self._inner.release(sequences)


class CheckedSearch(CheckedStrategy, Search):
    """`inner`, called `name` in errors; its groups go on with what they have."""

    def __init__(self, inner: Search, name: str, vocab_size: int) -> None:
        super().__init__(inner, name, vocab_size)
        self._search = inner

    def width(self, settings: Settings) -> int:
        with guarded(self, "width"):
            found = self._search.width(settings)
        if type(found) is not int or found < 1:
            raise fault(self, f"width must return a whole number from 1 on; got {shown(found)}")
        return found

    def decide(self, groups: Seq[Group], scores: Seq[torch.Tensor]) -> list[Decision]:
        with guarded(self, "decide"):
            found = self._search.decide(groups, scores)
            wrong = "" if len(found) == len(groups) else f"{len(found)} decisions"
            for group, decision in zip(groups, found, strict=False):
                wrong = wrong or self._flaw(group, decision)
        if wrong:
            raise fault(self, f"decide must return one decision a group; got {wrong}")
        return found

    def _flaw(self, group: Group, decision: Decision) -> str:
        """What is wrong with a decision, in words; empty: nothing."""
        if len(decision.beams) > group.width:
            return f"{len(decision.beams)} beams of a group of {group.width}"
        for beam in decision.beams:
            if not (0 <= beam.parent < len(group.beams) and self._is_token(beam.token)):
                return f"{beam}, where there are {len(group.beams)} beams"
        for hypothesis in decision.hypotheses:
            if not (hypothesis.tokens and all(map(self._is_token, hypothesis.tokens))):
                return f"a hypothesis of {hypothesis.tokens!r}"
        return ""


def checked(strategy: Strategy, name: str, vocab_size: int) -> CheckedStrategy:
    """`strategy` held to the contract that it has."""
    if isinstance(strategy, Search):
        return CheckedSearch(strategy, name, vocab_size)
    return CheckedStrategy(strategy, name, vocab_size)
