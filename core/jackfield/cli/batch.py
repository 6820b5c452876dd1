"""`jackfield batch`: a file of requests in OpenAI's batch format, answered here or by replicas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jackfield.cli.on_ray import WITHOUT_REPLICAS, RayAddressOption, ReplicasOption
from jackfield.cli.options import Answers, Backends, Batches, JsonOption, ModelOption
from jackfield.cli.output import note, print_json, progress, ran
from jackfield.errors import ExecutionError, UsageError

if TYPE_CHECKING:
    from jackfield.batch.running import Job, Outcome
    from jackfield.replicas.lines import OnRay

MISSING = "batch jobs need what a server needs; pip install jackfield[serve]"

InputArgument = Annotated[
    Path,
    typer.Argument(metavar="IN", help="Requests: lines of JSON, or .parquet.", show_default=False),
]
OutputArgument = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="Their answers: lines of JSON, or .parquet.", show_default=False
    ),
]


def batch(
    backends: Backends,
    batches: Batches,
    answers: Answers,
    source: InputArgument,
    output: OutputArgument,
    model: ModelOption = "demo",
    replicas: ReplicasOption = None,
    ray_address: RayAddressOption = None,
    json: JsonOption = False,
) -> None:
    """Answer the requests of a file in OpenAI's batch format.

    Each line has custom_id, method, url and body; each answer is appended to OUT as it ends, and at
    the end they stand in the order of IN. What failed is in OUT.errors.jsonl, and the exit code is
    1. After a kill, a full disk or a failure the same command goes on where it was.

    Example: jackfield batch requests.jsonl answers.jsonl --model demo
    """
    try:
        from jackfield.batch import running
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error.name} is not here)") from None
    arguments = {**backends.arguments(), **batches.arguments()}
    elsewhere = None if replicas is None else _on_ray(replicas, ray_address)
    if elsewhere is None and ray_address is not None:
        raise UsageError(WITHOUT_REPLICAS)
    job = running.Job(source, output, model, arguments, answers.given())
    with progress("lines") as moved:
        outcome = running.run(job, moved, elsewhere)
    if json:
        print_json(_as_json(outcome))
    else:
        note(f"{_counts(outcome)} · {ran(outcome.report)}")
    if outcome.failed:
        raise ExecutionError(_failures(job, outcome))


def _on_ray(replicas: str, address: str | None) -> OnRay:
    from jackfield.replicas.cluster import Count
    from jackfield.replicas.lines import OnRay

    return OnRay(Count.of(replicas), address)


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "lines": outcome.total, "done_before": outcome.before, "answered": outcome.answered,
        "failed": outcome.failed, "plan": outcome.plan.to_dict(),
        "report": outcome.report.to_dict(),
    }  # fmt: skip


def _counts(outcome: Outcome) -> str:
    before = f", {outcome.before} of them before" if outcome.before else ""
    return f"{outcome.answered} of {outcome.total} lines are answered{before}"


def _failures(job: Job, outcome: Outcome) -> str:
    told = f"{outcome.failed} of {outcome.total} lines failed; {job.errors} says why"
    return f"{told}; the first: {outcome.first_failure}"
