"""Exact-match accuracy on held-out items of the demo tasks: does a backend change the answers?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jackfield.demo.tasks import TASKS, Item, heldout
from jackfield.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

BATCH_SIZE = 32

#: The smallest task has some thousand held-out items in all; they are drawn without repetition.
MAX_COUNT = 1000


def check_count(count: int) -> None:
    """Raise SettingsError unless each task has so many items."""
    if not 1 <= count <= MAX_COUNT:
        raise SettingsError(f"the count must be from 1 to {MAX_COUNT} a task, not {count}")


@dataclass(frozen=True)
class TaskScore:
    """How many items of a task were answered exactly."""

    task: str
    right: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.right / self.total


@dataclass(frozen=True)
class Evaluation:
    """The scores of every task, in the order of `TASKS`. `seconds` is the time of generating."""

    scores: tuple[TaskScore, ...]
    count: int
    seed: int
    seconds: float

    @property
    def right(self) -> int:
        return sum(score.right for score in self.scores)

    @property
    def total(self) -> int:
        return sum(score.total for score in self.scores)

    @property
    def accuracy(self) -> float:
        return self.right / self.total

    def to_dict(self) -> dict[str, Any]:
        return {
            "tasks": {s.task: {**asdict(s), "accuracy": s.accuracy} for s in self.scores},
            "right": self.right,
            "total": self.total,
            "accuracy": self.accuracy,
            "count": self.count,
            "seed": self.seed,
            "seconds": round(self.seconds, 6),
        }


def evaluate(
    engine: Engine,
    count: int = 50,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Ask `count` held-out items of each demo task, greedily, as chat messages.

    An answer is right when it is exactly the expected one and ended by itself. `progress` is called
    with the number of items done since its last call. Raises SettingsError for a count outside 1 to
    1000, PromptError where the model cannot chat.
    """
    check_count(count)
    if engine.tokenizer is None:
        raise PromptError("this model has no tokenizer, and the demo tasks are texts")
    items = [item for task in TASKS for item in heldout(task, count, seed=seed)]
    started = time.perf_counter()
    right: dict[str, int] = dict.fromkeys(TASKS, 0)
    for start in range(0, len(items), BATCH_SIZE):
        batch = items[start : start + BATCH_SIZE]
        for item, correct in zip(batch, _answer(engine, batch), strict=True):
            right[item.task] += correct
        progress(len(batch))
    scores = tuple(TaskScore(task, right[task], count) for task in TASKS)
    return Evaluation(scores, count, seed, time.perf_counter() - started)


def _answer(engine: Engine, items: list[Item]) -> list[bool]:
    prompts = [[{"role": "user", "content": item.prompt}] for item in items]
    own = [{"max_new_tokens": _room(engine, item)} for item in items]
    completions = engine.generate(prompts, settings=own, do_sample=False)
    return [
        completion.finish_reason == "stop" and item.matches(completion.text or "")
        for item, completion in zip(items, completions, strict=True)
    ]


def _room(engine: Engine, item: Item) -> int:
    """Enough for the right answer in any tokens; what goes on for longer is wrong anyway."""
    return 2 * len(engine.tokenizer(item.answer)["input_ids"]) + 8  # type: ignore[misc]
