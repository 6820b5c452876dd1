"""Evaluation counts exactly the answers that are right and that ended by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import jackfield
from jackfield.demo.tasks import TASKS, heldout
from jackfield.errors import PromptError, SettingsError
from jackfield.estimates.evaluation import MAX_COUNT, Evaluation, TaskScore, evaluate

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with jackfield.load("demo") as made:
        yield made


class Parrot:
    """Stands for an engine: answers with what `answers` holds, in the form of completions."""

    def __init__(self, engine: Engine, answers: dict[str, tuple[str | None, str]]) -> None:
        self.tokenizer = engine.tokenizer
        self.answers = answers
        self.calls: list[dict[str, Any]] = []

    def generate(self, prompts: Any, *, settings: Any, **common: Any) -> list[Any]:
        self.calls += [{**common, **own} for own in settings]
        return [self._completion(*self.answers[prompt[0]["content"]]) for prompt in prompts]

    @staticmethod
    def _completion(text: str | None, finish_reason: Any) -> jackfield.Completion:
        ran: Any = None
        usage: Any = None
        return jackfield.Completion(text, [], finish_reason, usage, ran)


def test_only_whole_right_answers_count(engine: Engine) -> None:
    items = {task: heldout(task, 3, seed=5) for task in TASKS}
    answers: dict[str, tuple[str | None, str]] = {
        item.prompt: ("something else", "stop") for task in TASKS for item in items[task]
    }
    first, second, third = items["sort"]
    answers[first.prompt] = (f" {first.answer}\n", "stop")
    answers[second.prompt] = (second.answer, "length")
    answers[third.prompt] = (None, "error")
    parrot: Any = Parrot(engine, answers)
    result = evaluate(parrot, 3, seed=5)
    assert {score.task: score.right for score in result.scores} == {
        task: int(task == "sort") for task in TASKS
    }
    assert (result.right, result.total) == (1, 3 * len(TASKS))


def test_every_answer_is_greedy_and_has_room(engine: Engine) -> None:
    items = [item for task in TASKS for item in heldout(task, 2)]
    parrot: Any = Parrot(engine, {item.prompt: (item.answer, "stop") for item in items})
    assert evaluate(parrot, 2).accuracy == 1
    assert all(call["do_sample"] is False for call in parrot.calls)
    assert engine.tokenizer is not None
    for call, item in zip(parrot.calls, items, strict=True):
        assert call["max_new_tokens"] > len(engine.tokenizer(item.answer)["input_ids"])


def test_the_demo_model_answers_the_same_twice(engine: Engine) -> None:
    done: list[int] = []
    first = evaluate(engine, 2, seed=1, progress=done.append)
    assert sum(done) == first.total == 2 * len(TASKS)
    assert [score.task for score in first.scores] == list(TASKS)
    assert evaluate(engine, 2, seed=1).scores == first.scores
    assert first.right > 0


def test_to_dict() -> None:
    result = Evaluation((TaskScore("a", 1, 2), TaskScore("b", 2, 2)), count=2, seed=7, seconds=0.5)
    assert result.to_dict() == {
        "tasks": {
            "a": {"task": "a", "right": 1, "total": 2, "accuracy": 0.5},
            "b": {"task": "b", "right": 2, "total": 2, "accuracy": 1.0},
        },
        "right": 3,
        "total": 4,
        "accuracy": 0.75,
        "count": 2,
        "seed": 7,
        "seconds": 0.5,
    }


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_a_count_that_cannot_be_is_refused(engine: Engine, count: int) -> None:
    with pytest.raises(SettingsError, match=f"from 1 to {MAX_COUNT} a task, not {count}"):
        evaluate(engine, count)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_as_many_items_as_may_be_asked_for(task: str) -> None:
    assert len(heldout(task, MAX_COUNT)) == MAX_COUNT


def test_a_model_without_a_tokenizer_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "tokenizer", None)
    with pytest.raises(PromptError, match="no tokenizer"):
        evaluate(engine)
