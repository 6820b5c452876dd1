"""A strategy bound as an engine binds it, and a draft model that is known to be right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

from jackfield.api import plan
from jackfield.contracts import Assistant, BindContext, Requirements, Search, Sequence, Strategy
from jackfield.testing.checks import WrongError
from jackfield.testing.models import build
from jackfield.testing.subject import Subject

#: What follows a sequence's tokens: its next ones, as many as are asked for.
Continuation = Callable[[Sequence, int], list[int]]


def bind(subject: Subject, assistant: Assistant | None = None) -> Strategy:
    """The strategy of `subject`, bound to a model of the kit's with the seed of the subject."""
    own = subject.backend.capabilities
    selection = "sample" if own.heads else subject.selection  # no model here has heads
    model, needs = _planned(selection, subject.seed, subject.wants_draft_model)
    context = BindContext(
        model=model,
        config=model.config,
        requirements=needs,
        options=subject.options,
        assistant=assistant,
    )
    strategy = subject.backend.bind(context)
    if not isinstance(strategy, Strategy):
        raise WrongError(f"bind must return a Strategy, not {strategy!r:.80}")
    if isinstance(strategy, Search) != own.forks:
        what = "a Search" if isinstance(strategy, Search) else "a Strategy that is no Search"
        raise WrongError(f"bind returned {what}, and forks={own.forks} is declared")
    return strategy


@functools.cache
def _planned(selection: str, seed: int, helped: bool) -> tuple[Any, Requirements]:
    model = build("plain", seed=seed)
    helper: dict[str, Any] = {"assistant_model": model} if helped else {}
    return model, plan(model, decoding=selection, **helper).requirements


class Assisting:
    """A draft model that goes on as `truth` says, and looks at how it is asked.

    What the strategy does wrong is kept in `wrong`: the strategy might swallow an error.
    """

    def __init__(self, truth: Continuation, context_length: int | None = None) -> None:
        self.context_length = context_length
        self.held: set[int] = set()
        self.wrong: str | None = None
        self.thresholds: list[float] = []
        self.asked: list[int] = []
        self._truth = truth
        self._room: dict[int, int] | None = None

    @contextmanager
    def proposing(self, sequences: Seq[Sequence], rooms: Seq[int]) -> Iterator[None]:
        """While it is open, `propose` runs for these."""
        self._room = {id(s): room for s, room in zip(sequences, rooms, strict=True)}
        self.thresholds, self.asked = [], []
        try:
            yield
        finally:
            self._room = None
        if self.wrong is not None:
            raise WrongError(self.wrong)

    def draft(
        self, sequences: Seq[Sequence], max_drafts: Seq[int], confidence_threshold: Seq[float]
    ) -> list[list[int]]:
        self.wrong = self.wrong or self._flaw(sequences, max_drafts, confidence_threshold)
        self.held |= {s.id for s in sequences}
        self.thresholds += list(confidence_threshold)
        self.asked += list(max_drafts)
        pairs = zip(sequences, max_drafts, strict=False)
        return [self._truth(sequence, count) for sequence, count in pairs]

    def release(self, sequences: Seq[Sequence]) -> None:
        self.held -= {s.id for s in sequences}

    def _flaw(
        self, sequences: Seq[Sequence], max_drafts: Seq[int], thresholds: Seq[float]
    ) -> str | None:
        if self._room is None:
            return "calls the draft model outside of propose"
        if not len(sequences) == len(max_drafts) == len(thresholds):
            return (
                f"asks the draft model about {len(sequences)} sequences with {len(max_drafts)} "
                f"numbers of drafts and {len(thresholds)} thresholds"
            )
        for sequence, count, threshold in zip(sequences, max_drafts, thresholds, strict=True):
            if (room := self._room.get(id(sequence))) is None:
                return "hands the draft model a sequence that propose was not asked about"
            if type(count) is not int or not 0 <= count <= room:
                return f"asks the draft model for {count!r} drafts where there is room for {room}"
            if not 0 <= threshold <= 1:
                return f"hands the draft model a confidence threshold of {threshold!r}, not 0 to 1"
        return None
