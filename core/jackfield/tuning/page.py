"""What tuning tried as one HTML page that needs nothing beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from jackfield.benchmarking import page, plots
from jackfield.benchmarking.plots import Marks, Point
from jackfield.units import in_units


def html(profile: Mapping[str, Any]) -> str:
    """Plots of speed against memory and quality, and a table, of a profile's content."""
    rows: Sequence[Mapping[str, Any]] = profile["evidence"]
    measured = [row for row in rows if row["rounds"]]
    unit = "request" if profile["made"]["workload"]["arrivals"] else "round"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["size"] = in_units
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        made=profile["made"],
        selections=profile["selections"],
        rows=rows,
        style=environment.from_string(page.STYLE).render(),
        plots=list(_plots(measured, unit)),
        unit=unit,
        raw=json.dumps(profile, default=str, indent=1),
    )


def _plots(measured: Sequence[Mapping[str, Any]], unit: str) -> Iterator[tuple[str, str]]:
    speed = f"{unit}s a second"
    marks = [_marks(number, row) for number, row in enumerate(measured)]
    yield "How fast", plots.rows("How fast", f"seconds a {unit}, its middle half", marks)
    for name, axis, scale in (
        ("peak_bytes", "peak of memory, MB", 1e-6), ("perplexity", "perplexity", 1.0),
    ):  # fmt: skip
        points = [
            Point(f"{row['rung']} {row['label']}", number, row[name] * scale, 1 / row["seconds"])
            for number, row in enumerate(measured)
            if row[name] is not None and math.isfinite(row[name])
        ]
        if points:
            title = f"Speed against {axis.partition(',')[0]}"
            yield title, plots.scatter(title, axis, speed, points)


def _marks(number: int, row: Mapping[str, Any]) -> Marks:
    low, high = row["seconds_middle_half"]
    label = f"{row['rung']}: {row['label']}"
    return Marks(label, number, middle=row["seconds"], low=low, high=high)
