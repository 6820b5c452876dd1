"""The same model with two selections: does it still answer as well, and what does it take?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.demo.tasks import TASKS, heldout
from jackfield.engine.report import Report
from jackfield.errors import PromptError, UsageError
from jackfield.estimates.evaluation import Evaluation, check_count, evaluate
from jackfield.estimates.perplexity import Perplexity, check_text, perplexity
from jackfield.planning.planning import Plan

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

#: How much worse "after" may be where nobody says: 2 of 100 answers, and 5 % of perplexity.
MAX_DROP = 0.02
MAX_RISE = 0.05

_NO_TEXTS = "this model has no tokenizer, and what it is compared on are texts"
_ITEMS = 6  # of each task, in the text that is read where none is given


@dataclass(frozen=True)
class Quality:
    """How well a model answers with one plan. `weight_bytes` is what its weights take, loaded.

    `tasks` is None where the demo tasks were not asked.
    """

    plan: Plan
    report: Report
    weight_bytes: int
    tasks: Evaluation | None
    perplexity: Perplexity

    def to_dict(self) -> dict[str, Any]:
        return {
            "weight_bytes": self.weight_bytes,
            "tasks": self.tasks.to_dict() if self.tasks else None,
            "perplexity": self.perplexity.to_dict(),
            "plan": self.plan.to_dict(),
            "report": self.report.to_dict(),
        }


@dataclass(frozen=True)
class Comparison:
    """Before and after, and how much worse it may be.

    `max_drop` bounds how far the accuracy over all tasks falls (0.02: two answers of a hundred),
    `max_rise` by what share the perplexity rises (0.05: five per cent).
    """

    before: Quality
    after: Quality
    max_drop: float
    max_rise: float

    @property
    def drop(self) -> float | None:
        """How far the accuracy fell; negative where it rose, None where no task was asked."""
        if self.before.tasks is None or self.after.tasks is None:
            return None
        return self.before.tasks.accuracy - self.after.tasks.accuracy

    @property
    def rise(self) -> float:
        """By what share the perplexity rose; negative where it fell."""
        return self.after.perplexity.value / self.before.perplexity.value - 1

    @property
    def failures(self) -> list[str]:
        """Each bound that does not hold, in a sentence; none: it is as good as it has to be."""
        found = []
        # Rounded, since 0.98 - 0.96 is more than 0.02 in binary.
        if self.drop is not None and round(self.drop, 9) > self.max_drop:
            assert self.before.tasks is not None
            assert self.after.tasks is not None
            found.append(
                f"accuracy fell by {self.drop:.1%}, from {self.before.tasks.accuracy:.1%} to "
                f"{self.after.tasks.accuracy:.1%}; at most {self.max_drop:.1%} may be lost"
            )
        if not round(self.rise, 9) <= self.max_rise:  # also where it is not a number
            found.append(
                f"perplexity rose by {self.rise:.1%}, from {self.before.perplexity.value:.4g} to "
                f"{self.after.perplexity.value:.4g}; it may rise by at most {self.max_rise:.1%}"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "drop": self.drop,
            "max_drop": self.max_drop,
            "rise": self.rise,
            "max_rise": self.max_rise,
            "ok": not self.failures,
            "failures": self.failures,
        }


def built_in_text() -> str:
    """Questions of the demo tasks with their answers, which the demo model never saw."""
    items = [item for task in TASKS for item in heldout(task, _ITEMS)]
    return "\n\n".join(f"{item.prompt}\n{item.answer}" for item in items)


def assess(
    engine: Engine,
    *,
    text: str | None = None,
    tasks: bool = True,
    count: int = 50,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Quality:
    """How well an engine's model answers the demo tasks (if asked) and predicts a text.

    Without a `text`, the built-in one is read. `progress` is called with the number of items done
    since its last call.
    """
    from jackfield.bridge.footprint import loaded_bytes

    if engine.tokenizer is None:
        raise PromptError(_NO_TEXTS)
    asked = evaluate(engine, count, seed, progress) if tasks else None
    read = perplexity(engine, built_in_text() if text is None else text)
    size = loaded_bytes(engine.model, engine.plan["quantizer"].registered)
    return Quality(engine.plan, engine.report(), size, asked, read)


def compare(
    model: Any,
    after: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    *,
    text: str | None = None,
    tasks: bool | None = None,
    count: int = 50,
    seed: int = 0,
    max_drop: float = MAX_DROP,
    max_rise: float = MAX_RISE,
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Load `model` twice, one after the other, and compare how well it answers.

    `after` and `before` are arguments of `jackfield.load`, "model" among them where it is another;
    `before` None: those of `after` without quantization. `tasks` None: the demo tasks are asked of
    the demo model, and other models are compared on the text alone. Raises the errors of
    `jackfield.load`, UsageError for a bound that is not a number, at least 0, SettingsError for a
    `count` that cannot be, and PromptError for a `text` too short: all that can be seen without
    weights before the first is loaded.
    """
    for name, bound in (("max_drop", max_drop), ("max_rise", max_rise)):
        if not bound >= 0:  # also one that is not a number
            raise UsageError(f"{name} must be a number, at least 0, not {bound!r}")
    if before is None:
        before = {**after, "quantization": "none"}
    if dict(before) == dict(after):
        raise UsageError("before and after are the same; select something else for one of them")
    sides = [{"model": model, **before}, {"model": model, **after}]
    asked = all(side["model"] == "demo" for side in sides) if tasks is None else tasks
    if asked:
        check_count(count)
    text = built_in_text() if text is None else text
    for side in sides:
        _prepare(side, text)
    first, second = (_assess(side, text, asked, count, seed, progress) for side in sides)
    return Comparison(first, second, max_drop, max_rise)


def _prepare(side: Mapping[str, Any], text: str) -> None:
    """Raise what loading one side would raise, and PromptError for a text that it cannot score."""
    from jackfield.api import prepare
    from jackfield.bridge.tokenizer import Text

    ready = prepare(**side)
    if ready.tokenizer is None:
        raise PromptError(_NO_TEXTS)
    check_text(Text(ready.tokenizer, ready.job.source.vocab_size), text)


def _assess(
    side: Mapping[str, Any],
    text: str,
    tasks: bool,
    count: int,
    seed: int,
    progress: Callable[[int], None],
) -> Quality:
    """Load, assess, and give the memory back before the other side is loaded."""
    from jackfield.api import load

    arguments = dict(side)
    with load(arguments.pop("model"), **arguments) as engine:
        return assess(engine, text=text, tasks=tasks, count=count, seed=seed, progress=progress)
