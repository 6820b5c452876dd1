"""`jackfield doctor`: what is installed here, what is wrong with it, and what to do."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import typer

from jackfield.cli.options import JsonOption
from jackfield.cli.output import console, print_json, table

if TYPE_CHECKING:
    from jackfield.registry.findings import Finding

COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(json: JsonOption = False) -> None:
    """Check plugins, library versions, devices, compilers and stale installations.

    Each finding is ok, a warning or a problem, and says what to do. The exit code is 1 when there
    is a problem.

    Example: jackfield doctor --json
    """
    from jackfield.registry.inspection import examine

    findings = examine()
    healthy = all(finding.state != "problem" for finding in findings)
    if json:
        print_json({"ok": healthy, "findings": [finding.to_dict() for finding in findings]})
    else:
        _print(findings)
    if not healthy:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    out = console()
    for area, members in groupby(findings, key=lambda finding: finding.area):
        out.print(area, style="bold")
        rows = table()
        rows.add_column(no_wrap=True, min_width=9)
        rows.add_column(overflow="fold")
        for finding in members:
            text = Text(f"{finding.subject}: {finding.message}")
            if finding.advice:
                text.append(f"\n{finding.advice}", style="italic")
            rows.add_row(Text(f"  {finding.state}", style=COLORS[finding.state]), text)
        out.print(rows)
    counts = {state: sum(f.state == state for f in findings) for state in COLORS}
    out.print(f"{counts['problem']} problem(s), {counts['warning']} warning(s), {counts['ok']} ok")
