"""Saved runs as a page of Markdown: each figure with where, when and by what command it was had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jackfield.benchmarking.results import Benchmark, Row
from jackfield.benchmarking.verdicts import Change
from jackfield.units import in_milliseconds, in_units

_COLUMNS = (
    "row", "tokens/s", "time (from, to)", "", "first token", "per token", "peak", "bandwidth",
    "compute",
)  # fmt: skip
#: What a reader needs to know of every table.
_HEAD = """\
# Measured

Made by `jackfield bench page` from saved runs, never typed. Time is how many times as long a row
takes as the first one, with its interval; first token and per token are medians; bandwidth and
compute are shares of what the device can read and multiply; a row that is no result has its reason.
"""


def markdown(runs: Mapping[str, Benchmark]) -> str:
    """A page with a section for each run; they are named as `runs` names them."""
    return "\n".join([_HEAD, *(_section(name, run) for name, run in runs.items())])


def _section(name: str, run: Benchmark) -> str:
    work, around = run.workload, run.surroundings
    title = name.replace("-", " ").replace("_", " ")
    rows = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS)), *(_row(run, row) for row in run.rows)]
    versions = ", ".join(f"{key} {value}" for key, value in around.get("versions", {}).items())
    asked = f"{work['prompt_tokens']} prompt tokens and {work['new_tokens']} new ones a round"
    rounds = max((len(row.rounds) for row in run.rows), default=0)
    at = f"{around.get('hardware')}, {around.get('cores')} cores; {versions}; {around.get('date')}"
    return "\n".join([
        f"## {title[:1].upper()}{title[1:]}",
        "",
        f"{work['name']}: {work['requests']} requests, {asked}, {work['batch']} at a time.",
        "",
        *rows,
        *_reasons(run),
        "",
        f"{rounds} rounds on {at}.",
        *_roof(run),
        "",
        "```",
        f"$ {around.get('command')}",
        "```",
        "",
    ])  # fmt: skip


def _row(run: Benchmark, row: Row) -> str:
    if not (row.valid and row.measured):
        return _line([row.label, "invalid", *[""] * (len(_COLUMNS) - 2)])
    memory, compute = row.shares or (None, None)
    change = run.change(row)
    return _line([
        row.label,
        f"{run.workload['new_tokens'] / row.seconds:.4g}",
        "1" if row.label == run.base else _ratio(change),
        "" if change is None else str(change.verdict),
        in_milliseconds(row.middle("first")),
        in_milliseconds(row.middle("per_token")),
        "" if row.peak_bytes is None else in_units(row.peak_bytes),
        *("" if share is None else f"{share:.0%}" for share in (memory, compute)),
    ])  # fmt: skip


def _ratio(change: Change | None) -> str:
    if change is None:
        return ""
    known = change.low > 0
    return f"{change.ratio:.2f}" + (f" ({change.low:.2f}, {change.high:.2f})" if known else "")


def _roof(run: Benchmark) -> Iterator[str]:
    if run.roof:
        yield f"Bandwidth and compute are shares of {run.roof}, measured after the rounds."


def _reasons(run: Benchmark) -> Iterator[str]:
    reasons = [f"- {row.label}: {reason}" for row in run.rows for reason in row.reasons]
    if reasons:
        yield ""
        yield from reasons


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
