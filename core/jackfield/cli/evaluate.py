"""`jackfield eval`: does a backend change the answers? Accuracy on the demo tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from jackfield.cli.options import Backends, JsonOption, ModelOption, load
from jackfield.cli.output import console, note, print_json, ran, table

if TYPE_CHECKING:
    from jackfield.engine import Engine
    from jackfield.evaluation import Evaluation

CountOption = Annotated[int, typer.Option(metavar="N", help="How many items of each task.")]
SeedOption = Annotated[int, typer.Option(metavar="N", help="Another seed draws other items.")]


def evaluate(
    backends: Backends,
    model: ModelOption = "demo",
    count: CountOption = 50,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Measure exact-match accuracy on the demo tasks.

    Greedy answers to items that the demo model never saw in training. Run it with two backends: the
    accuracy must not differ by more than chance.

    Example: jackfield eval --attention eager --count 20
    """
    with load(model, backends) as engine:
        result = _evaluate(engine, count, seed)
        report, plan = engine.report(), engine.plan
    if json:
        print_json(result.to_dict() | {"plan": plan.to_dict(), "report": report.to_dict()})
        return
    _print(result)
    note(f"{ran(report)} · {result.total} items in {result.seconds:.1f} s")


def _evaluate(engine: Engine, count: int, seed: int) -> Evaluation:
    """Evaluate, on a terminal with a progress bar on standard error."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from jackfield.demo.tasks import TASKS
    from jackfield.evaluation import evaluate

    errors = console(stderr=True)
    if not errors.is_terminal:
        return evaluate(engine, count, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as bar:
        task = bar.add_task("items", total=len(TASKS) * count)
        return evaluate(engine, count, seed, progress=lambda done: bar.advance(task, done))


def _print(result: Evaluation) -> None:
    rows = table("task")
    for heading in ("right", "items", "accuracy"):
        rows.add_column(heading, justify="right")
    for score in result.scores:
        rows.add_row(score.task, str(score.right), str(score.total), f"{score.accuracy:.1%}")
    rows.add_row("all", str(result.right), str(result.total), f"{result.accuracy:.1%}")
    console().print(rows)
