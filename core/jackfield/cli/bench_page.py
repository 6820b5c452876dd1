"""`jackfield bench page`: saved runs as a page of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jackfield.cli.files import decoded, read_file
from jackfield.cli.options import flag
from jackfield.cli.output import say
from jackfield.errors import UsageError, shown


def page(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs that were saved.")],
    output: Annotated[
        Path | None, flag("--output", "FILE", "Write it there; it is printed without it.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing: exit code 1 where FILE says otherwise.")
    ] = False,
) -> None:
    """Make a page of Markdown from saved runs, so that no figure is typed.

    Each table has the hardware, the versions, the date and the command of its run. The runs come in
    the order of their names.

    Example: jackfield bench page runs/*.json --output docs/measured.md
    """
    from jackfield.benchmarking import saved
    from jackfield.benchmarking.markdown import markdown

    if check and output is None:
        raise UsageError("--check compares a page with its runs; add --output FILE")
    named = {path.stem: path for path in sorted(runs, key=lambda path: path.name)}
    if len(named) < len(runs):
        raise UsageError("two runs have one name, which is their heading; rename one")
    text = markdown({name: saved.read(path) for name, path in named.items()})
    if output is None:
        print(text, end="")
    elif not check:
        saved.check_file(output, "--output")
        saved.write(output, text)
    elif not output.exists() or decoded(read_file(output), str(output)) != text:
        say(f"{shown(output)} is not what these runs say; make it anew, without --check")
        raise typer.Exit(1)
