"""Writes docs/options.md: every command with its arguments and options, from the code itself.

Run it after a change: `python tools/options_page.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from jackfield.cli.app import app

PAGE = Path(__file__).parents[1] / "docs/options.md"
HEAD = """# Every option

Made from the code by `tools/options_page.py`; [the command line](cli.md) says what it is for.
"""


def page() -> str:
    """The whole page."""
    command: Any = typer.main.get_command(app)
    parts = [HEAD, "## jackfield\n", _table(command)]
    for name, one in _commands(command):
        about = (one.help or "").strip().splitlines()[0]
        parts += [f"## jackfield {name}\n", f"{about}\n", _table(one)]
    return "\n".join(parts).rstrip() + "\n"


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in group.commands.items():
        inner = getattr(one, "commands", None)
        yield from ((f"{before}{name}", one),) if not inner else _commands(one, f"{before}{name} ")


def _table(command: Any) -> str:
    rows = ["| option | value | meaning |", "|---|---|---|"]
    for one in command.params:
        if one.param_type_name == "argument":
            names, value = f"`{one.metavar or one.name.upper()}`", ""
        else:
            names = ", ".join(f"`{name}`" for name in one.opts)
            value = "" if one.is_flag else f"`{one.metavar or one.name.upper()}`"
        about = (getattr(one, "help", None) or "").replace("|", r"\|").replace("\n", " ")
        rows.append(f"| {names} | {value} | {about} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
