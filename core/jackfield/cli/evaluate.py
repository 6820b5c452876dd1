"""`jackfield eval`: does a backend change the answers? Accuracy on the demo tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jackfield.cli.compare import baseline, compare, perplexity_of
from jackfield.cli.files import decoded, read_file
from jackfield.cli.options import Backends, Batches, JsonOption, ModelOption, flag, load
from jackfield.cli.output import console, note, print_json, progress, ran, table
from jackfield.errors import UsageError

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine
    from jackfield.estimates.evaluation import Evaluation

CountOption = Annotated[int, typer.Option(metavar="N", help="How many items of each task.")]
SeedOption = Annotated[int, typer.Option(metavar="N", help="Another seed draws other items.")]


@dataclass(frozen=True)
class Against:
    """What is read beside the tasks, what it is compared with, and how much worse it may be."""

    text: Annotated[
        Path | None, flag("--text", "FILE", "Read this text; its perplexity is shown.")
    ] = None
    baseline: Annotated[
        list[str] | None,
        flag("--baseline", "KIND=NAME", "Compare with the same, but for this; repeatable."),
    ] = None
    tasks: Annotated[
        bool | None,
        typer.Option("--tasks/--no-tasks", help="Ask the demo tasks; only of demo without it."),
    ] = None
    max_drop: Annotated[
        float | None, flag("--max-drop", "X", "How far accuracy may fall: 0.02 without it.")
    ] = None
    max_rise: Annotated[
        float | None, flag("--max-rise", "X", "How far perplexity may rise: 0.05 without it.")
    ] = None


def evaluate(
    backends: Backends,
    against: Against,
    model: ModelOption = "demo",
    count: CountOption = 50,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Measure exact-match accuracy on the demo tasks, and compare two selections.

    Greedy answers to items that the demo model never saw in training. With --quantization, the same
    model is asked without it first; with --baseline, with that instead. A loss beyond --max-drop or
    --max-rise is an error with exit code 1.

    Example: jackfield eval --attention eager --baseline attention=sdpa --count 20
    """
    from jackfield.estimates.evaluation import check_count

    check_count(count)
    text = None if against.text is None else decoded(read_file(against.text), str(against.text))
    before = baseline(against.baseline, model, backends)
    if before is not None:
        compare(model, backends, before, against, text, count, seed, json)
        return
    for name in ("max_drop", "max_rise"):
        if getattr(against, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} needs two to compare; add --baseline")
    if against.tasks is False and text is None:
        raise UsageError("--no-tasks leaves nothing to measure; add --text FILE")
    with load(model, backends, Batches()) as engine:
        result = None if against.tasks is False else _evaluate(engine, count, seed)
        read = None if text is None else perplexity_of(engine, text)
        report, plan = engine.report(), engine.plan
    if json:
        found = {} if result is None else result.to_dict()
        found |= {} if read is None else {"perplexity": read.to_dict()}
        print_json(found | {"plan": plan.to_dict(), "report": report.to_dict()})
        return
    if result is not None:
        _print(result)
    if read is not None:
        console().print(f"perplexity {read.value:.4g} over {read.tokens} tokens")
    items = f"{result.total} items in {result.seconds:.1f} s" if result else "no tasks"
    note(f"{ran(report)} · {items}")


def _evaluate(engine: Engine, count: int, seed: int) -> Evaluation:
    """Evaluate, on a terminal with a progress bar on standard error."""
    from jackfield.demo.tasks import TASKS
    from jackfield.estimates.evaluation import evaluate

    done, total = 0, len(TASKS) * count
    with progress("items") as moved:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            moved(done, total)

        moved(done, total)
        return evaluate(engine, count, seed, progress=advance)


def _print(result: Evaluation) -> None:
    rows = table("task")
    for heading in ("right", "items", "accuracy"):
        rows.add_column(heading, justify="right")
    for score in result.scores:
        rows.add_row(score.task, str(score.right), str(score.total), f"{score.accuracy:.1%}")
    rows.add_row("all", str(result.right), str(result.total), f"{result.accuracy:.1%}")
    console().print(rows)
