"""`jackfield plugins`: what is installed. Loads no library that a backend stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.cli.options import JsonOption
from jackfield.cli.output import console, print_json, say, table

if TYPE_CHECKING:
    from rich.text import Text

    from jackfield.choosing.registry import PluginRecord

COLORS = {"loaded": "green", "failed": "red", "disabled": "yellow"}


def plugins(json: JsonOption = False) -> None:
    """List the installed plugins and what became of each.

    A plugin that failed says why; the others work on.

    Example: jackfield plugins --json
    """
    from jackfield.choosing.discovery import registry

    found = registry()
    if json:
        rows = [record.to_dict() for record in found.plugins]
        print_json({"plugins": rows, "warnings": found.warnings})
        return
    if found.plugins:
        _print(found.plugins)
    else:
        say("no plugin is installed; the built-in ones come with `pip install jackfield`")
    for warning in found.warnings:
        say(f"warning: {warning}")


def _print(records: list[PluginRecord]) -> None:
    from rich.text import Text

    rows = table("plugin", "distribution", "state", "offers")
    rows.columns[0].no_wrap = True  # a name that one can copy
    for record in records:
        origin = f"{record.distribution} {record.version}"
        state = Text(record.state, style=COLORS[record.state])
        rows.add_row(record.entry_point, origin, state, _offers(record))
    console().print(rows)


def _offers(record: PluginRecord) -> Text:
    """Each backend, the cause of a failure and other problems, each on its own line."""
    from rich.text import Text

    lines = [Text(backend) for backend in record.backends]
    if record.cause:
        lines.append(Text(record.cause, style=COLORS[record.state]))
    lines += [Text(problem, style="yellow") for problem in record.problems]
    return Text("\n").join(lines)
