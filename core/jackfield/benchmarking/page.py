"""A run as one HTML page that needs nothing beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jinja2

from jackfield.benchmarking import plots
from jackfield.benchmarking.plots import Marks
from jackfield.benchmarking.results import Benchmark, Row
from jackfield.benchmarking.saved import Comparison
from jackfield.units import in_milliseconds, in_units

#: The style of a page, with the colours of the plots; a template.
STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

INVALID, UNTOLD = "invalid: no result", "not told"


def html(found: Benchmark, comparison: Comparison | None = None) -> str:
    """Tables and plots of a run, and of what became of a saved one."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": in_units, "ms": in_milliseconds}
    return environment.from_string(text).render(
        style=environment.from_string(STYLE).render(),
        found=found,
        work=found.workload,
        changes={row.label: found.change(row) for row in found.rows},
        comparison=comparison,
        plots=list(_plots(found)),
        raw=json.dumps(found.to_dict(), default=str, indent=1),
    )


def _plots(found: Benchmark) -> Iterator[tuple[str, str]]:
    new = found.workload["new_tokens"]

    color = {row.label: number for number, row in enumerate(found.rows)}

    def speed(row: Row) -> Marks:
        return Marks(row.label, color[row.label], [new / t for t in row.times], new / row.seconds)

    def memory(row: Row) -> Marks:
        if row.peak_bytes is None:
            return Marks(row.label, color[row.label], note=UNTOLD)
        size = row.peak_bytes / 1e6
        return Marks(row.label, color[row.label], low=0.0, high=size, middle=size)

    title = "How fast"
    yield title, plots.rows(title, "tokens/s, a dot a round", _marks(found.rows, speed))
    if changes := list(_changes(found)):
        title = f"Beside {found.base}"
        unit = f"times as long as {found.base} takes; shaded: counts as unchanged"
        band = 1 / (1 + found.margin), 1 + found.margin
        yield title, plots.rows(title, unit, changes, band=band, zero=False)
    valid = [row for row in found.rows if row.valid and row.measured]
    if valid:
        title = "Round by round"
        series = [Marks(r.label, color[r.label], [1000 * t for t in r.times]) for r in valid]
        yield title, plots.lines(title, "round", "ms a round", series)
    for name, title in (("first", "First token"), ("per_token", "Each later token")):
        if any(row.middle(name) is not None for row in valid):
            marks = _marks(found.rows, partial(_milliseconds, name, color))
            yield title, plots.rows(title, "ms, a dot a round", marks)
    if any(row.peak_bytes for row in valid):
        title = "Peak of memory"
        unit = "MB above the process before it loaded"
        yield title, plots.rows(title, unit, _marks(found.rows, memory))
    yield from _roofline(valid, color)


def _marks(rows: Sequence[Row], made: Callable[[Row], Marks]) -> list[Marks]:
    return [
        made(row) if row.valid and row.measured else Marks(row.label, 0, note=INVALID)
        for row in rows
    ]


def _milliseconds(name: str, color: Mapping[str, int], row: Row) -> Marks:
    values = [1000 * v for one in row.rounds if (v := getattr(one, name)) is not None]
    middle = row.middle(name)
    if middle is None:
        return Marks(row.label, 0, note=UNTOLD)
    return Marks(row.label, color[row.label], values, 1000 * middle)


def _changes(found: Benchmark) -> Iterator[Marks]:
    if not found[found.base].valid:
        return
    for number, row in enumerate(found.rows):
        if not row.valid:
            yield Marks(row.label, 0, note=INVALID)
        elif (change := found.change(row)) is not None:
            known = change.low > 0
            low, high = (change.low, change.high) if known else (None, None)
            yield Marks(row.label, number, middle=change.ratio, low=low, high=high)


def _roofline(valid: Sequence[Row], color: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """One roof for each device and dtype."""
    for where in dict.fromkeys(row.limits["where"] for row in valid if row.limits):
        rows = [row for row in valid if row.limits and row.limits["where"] == where]
        own = rows[0].limits or {}
        points = [
            (color[row.label], one["flops"] / one["bytes_read"], one["flops"] / row.seconds)
            for row in rows
            if (one := row.limits) is not None
        ]
        title = f"Under the roof of {where}"
        x_unit, y_unit = "operations a byte that must be read", "operations/s"
        roof = own["bandwidth"], own["flop_rate"]
        yield title, plots.roofline(title, x_unit, y_unit, roof, points)
