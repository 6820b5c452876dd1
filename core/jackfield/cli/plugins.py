"""`jackfield plugins`: what is installed. Loads no library that a backend stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.cli.options import JsonOption
from jackfield.cli.output import console, print_json, print_listing, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jackfield.registry.backends import PluginRecord


def plugins(json: JsonOption = False) -> None:
    """List the installed plugins and what became of each.

    A plugin that failed says why; the others work on.

    Example: jackfield plugins --json
    """
    from jackfield.registry.discovery import registry

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
    out = console()
    rows = [(("plugin", "distribution", "state"), ["offers"])] + [
        ((r.entry_point, f"{r.distribution} {r.version}", r.state), list(_offers(r)))
        for r in records
    ]
    print_listing(out, rows, [r.state for r in records])


def _offers(record: PluginRecord) -> Iterator[str]:
    """Each backend, the cause of a failure and other problems."""
    yield from record.backends
    if record.cause:
        yield record.cause
    yield from record.problems
