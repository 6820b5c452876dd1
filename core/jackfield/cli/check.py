"""`jackfield check`: proves of an installed backend what it declares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jackfield.cli.options import JsonOption
from jackfield.cli.output import console, print_json, say

if TYPE_CHECKING:
    from rich.console import Console

    from jackfield.testing.checks import Verdict
    from jackfield.testing.report import Report
    from jackfield.testing.subject import Subject

COLORS = {"passed": "green", "failed": "bold red", "refused": "dim", "not tried": "yellow"}


def check(
    backend: Annotated[
        str,
        typer.Argument(metavar="BACKEND", help="As in a selection: plugin:name?option=value."),
    ],
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="Where several kinds have that name.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Checks whose names fit, as 'packed.*'; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    limit: Annotated[
        float, typer.Option(help="A factor on the time that each check may take.")
    ] = 1.0,
    list_: Annotated[bool, typer.Option("--list", help="Only list the checks.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check an installed backend: each capability that it declares, against a reference.

    What it does not declare must be refused. Every check runs in another process, with a time
    limit, on small random models: no network, no GPU. The exit code is 1 where a check fails.

    Example: jackfield check plugin:sdpa --kind attention
    """
    from jackfield.testing.process import Job, run
    from jackfield.testing.report import report_of
    from jackfield.testing.subject import subject_of

    _usable(device, limit, html)
    patterns = tuple(only or ())
    subject = subject_of(backend, kind, seed=seed, device=device)
    if list_:
        _list(subject, patterns)
        return
    out = console()
    # The checks, and torch, are imported where they run: here that would be seconds of waiting.
    job = Job(subject.selection, subject.kind, patterns, seed, device, limit)
    verdicts = run(job, (lambda _: None) if json else lambda v: _tell(out, v))
    if not verdicts:
        raise _nothing(patterns)
    report = report_of(subject, verdicts)
    if html is not None:
        html.write_text(report.html(), encoding="utf-8")
    if json:
        print_json(report.to_dict())
    else:
        _summary(report)
    if not report.passed:
        raise typer.Exit(1)


def _usable(device: str, limit: float, html: Path | None) -> None:
    """Raise UsageError for what cannot be, before anything is checked."""
    from jackfield.errors import UsageError, quoted
    from jackfield.paths import why_no_file

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device takes cpu or cuda, not {device!r}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no CUDA GPU here; leave it out for the CPU")
    if not 0 < limit < float("inf"):
        raise UsageError(f"--limit takes a factor above 0, not {limit:g}")
    if html is not None and (why := why_no_file(html)) is not None:
        raise UsageError(f"--html {quoted(str(html))} cannot be written: {why}")


def _list(subject: Subject, patterns: tuple[str, ...]) -> None:
    from jackfield.testing.process import chosen
    from jackfield.testing.suites import checks_of

    checks = chosen(checks_of(subject), patterns)
    if not checks:
        raise _nothing(patterns)
    for one in checks:
        print(f"{one.name}  ({one.capability})")


def _nothing(patterns: tuple[str, ...]) -> Exception:
    from jackfield.errors import UsageError

    return UsageError(f"no check fits {', '.join(patterns)}; `--list` lists their names")


def _tell(out: Console, verdict: Verdict) -> None:
    from rich.text import Text

    line = Text(f"{verdict.outcome:<9} ", style=COLORS[verdict.outcome])
    line.append(verdict.name, style="default not bold")
    if verdict.outcome in ("failed", "not tried"):
        line.append(f"\n          {verdict.message}", style="default not bold")
    if verdict.case:
        line.append(f"\n          smallest case: {verdict.case}", style="default not bold")
    out.print(line, soft_wrap=True)


def _summary(report: Report) -> None:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts.items())
    say(f"{report.backend}: {counts} (seed {report.seed}, {report.hardware})")
    for warning in report.warnings:
        say(f"warning: {warning}")
