"""A trace as its caller has it: a table, figures, and files."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jackfield.errors import UsageError, shown
from jackfield.paths import why_no_file
from jackfield.tracing.accounts import Account, Accounts, Record
from jackfield.tracing.chrome import events
from jackfield.tracing.lives import PHASES, Life
from jackfield.tracing.picture import html, svg
from jackfield.tracing.table import notes, rows, table

SUFFIXES = (".json", ".svg", ".html")


class Trace:
    """Where the time of requests went, while an engine was traced.

    Printed it is a table. `save` writes it for Perfetto, or as a picture. Both raise UsageError
    while the trace goes on.
    """

    def __init__(self) -> None:
        self._found: Record | None = None

    def end(self, record: Record) -> None:
        """What was found; called once, when the trace ends."""
        self._found = record

    @property
    def record(self) -> Record:
        """The spans themselves. Raises UsageError while the trace goes on."""
        if self._found is None:
            raise UsageError("the trace goes on; read it behind the `with` that it belongs to")
        return self._found

    @functools.cached_property
    def _accounts(self) -> Accounts:
        return Accounts.of(self.record)

    def __str__(self) -> str:
        return table(self.record, self._accounts)

    def to_dict(self) -> dict[str, Any]:
        """The figures of the table; times in seconds."""
        record, accounts = self.record, self._accounts
        layers = {
            layer: {kind: ns / 1e9 for kind, ns in times.items()}
            for layer, times in sorted(accounts.layers.items())
        }
        return {
            "model": record.model,
            "device": record.device,
            "seconds": (record.end - record.begin) / 1e9,
            "steps": accounts.steps,
            "decode_steps": accounts.decode_steps,
            "tokens": accounts.tokens,
            "work": [
                {"path": list(path), **_figures(found)} for path, found in rows(record, accounts)
            ],
            "backends": {who: _own(found) for who, found in accounts.backends.items()},
            "layers": layers,
            "requests": [_told(life, record) for life in record.requests],
            "notes": list(notes(record, accounts)),
        }

    def save(self, file: str | Path) -> None:
        """Write it to `file`, in the format that its ending names.

        `.json` for https://ui.perfetto.dev or chrome://tracing, `.svg` the picture, `.html` a page
        with the picture and the table. Raises UsageError for other endings, for a file that cannot
        be written, and while the trace goes on.
        """
        path = Path(file)
        check_file(path)
        record, accounts = self.record, self._accounts
        if path.suffix == ".json":
            parts = _pieces(events(record, accounts))
        elif path.suffix == ".svg":
            parts = iter([svg(record, accounts)])
        else:
            parts = iter([html(record, accounts, str(self))])
        try:
            with path.open("w", encoding="utf-8") as out:
                out.writelines(parts)
        except OSError as error:
            raise UsageError(f"cannot write {shown(path)}: {error.strerror}") from None


def check_file(file: Path) -> None:
    """Raise UsageError for a file that no trace can be written to."""
    if file.suffix not in SUFFIXES:
        raise UsageError(
            f"cannot write a trace to {shown(file)}: name a file that ends in .json (for "
            "Perfetto), .svg or .html"
        )
    if (why := why_no_file(file)) is not None:
        raise UsageError(f"cannot write {shown(file)}: {why}")


def _pieces(found: dict[str, Any]) -> Iterator[str]:
    """JSON with an event a line."""
    lines = (json.dumps(event, ensure_ascii=False) for event in found["traceEvents"])
    yield '{"traceEvents": [\n'
    for number, line in enumerate(lines):
        yield f",\n{line}" if number else line
    rest = {key: value for key, value in found.items() if key != "traceEvents"}
    yield f"\n], {json.dumps(rest, ensure_ascii=False)[1:]}\n"


def _figures(found: Account) -> dict[str, Any]:
    return {
        "calls": found.calls,
        "seconds": found.total / 1e9,
        "device_seconds": found.device / 1e9,
    }


def _own(found: Account) -> dict[str, Any]:
    return {
        "calls": found.calls,
        "seconds": found.own / 1e9,
        "device_seconds": found.device_own / 1e9,
    }


def _told(life: Life, record: Record) -> dict[str, Any]:
    first = life.first_token
    return {
        "id": life.id,
        "prompt_tokens": life.prompt_tokens,
        "found_tokens": life.found_tokens,
        "new_tokens": life.new_tokens,
        "finish_reason": life.outcome,
        "began_before": life.began,
        "preemptions": life.preemptions,
        "prefill_steps": life.prefill_steps,
        "decode_steps": life.decode_steps,
        "time_to_first_token": None if first is None else (first - life.came) / 1e9,
        **{name: life.spent(name, record.end) / 1e9 for name in PHASES},
    }
