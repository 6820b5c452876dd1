"""Plots as SVG: one mark a round, its unit on every axis, colours from the page around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 480, 12, 16
#: Heights: of a row with its label, of what is below the last one, and of a plot with two axes.
ROW, FOOT, HEIGHT = 44, 40, 260
TICKS = 6  # of an axis


@dataclass(frozen=True)
class Marks:
    """A row of a plot: `values` are small marks, `middle` the large one, `low` to `high` a bar.

    A row that is no result has a `note` in place of marks. `color` is the row's number in the run.
    """

    label: str
    color: int
    values: Sequence[float] = ()
    middle: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Point:
    """A point with a label, in the colour of its row."""

    label: str
    color: int
    x: float
    y: float


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most about `TICKS`."""
    step = 10 ** math.floor(math.log10((high - low) / TICKS))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= TICKS)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def rows(
    title: str,
    unit: str,
    marks: Sequence[Marks],
    *,
    band: tuple[float, float] | None = None,
    zero: bool = True,
) -> str:
    """Rows over one axis, which begins at 0 unless `zero` is false; `band` is shaded."""
    every = [v for one in marks for v in (*one.values, one.middle, one.low, one.high) if v]
    every += band or ()
    low, high = (0.0 if zero else min(every, default=0.9)), max(every, default=1.0)
    pad = (high - low or 1.0) * 0.05
    low, high = (low if zero else low - pad), high + pad
    height = ROW * len(marks) + FOOT + 8

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = []
    if band:
        parts.append(
            f'<rect class="band" x="{x(band[0]):.1f}" y="0" '
            f'width="{x(band[1]) - x(band[0]):.1f}" height="{height - FOOT}"/>'
        )
    for tick in ticks(low, high):
        parts += _vertical(x(tick), height - FOOT, f"{tick:g}")
    for number, one in enumerate(marks):
        parts += _row(one, ROW * number + 20, x)
    parts.append(_text(WIDTH / 2, height - 6, unit, "unit", "middle"))
    return _svg(title, height, parts)


def _row(one: Marks, y: float, x: Callable[[float], float]) -> Iterator[str]:
    yield _text(LEFT, y - 4, one.label, "label")
    if one.note:
        yield _text(LEFT, y + 14, one.note, "invalid")
        return
    color = f"c{one.color % 6}"
    if one.low is not None and one.high is not None:
        yield (
            f'<line class="bar {color}" x1="{x(one.low):.1f}" x2="{x(one.high):.1f}" '
            f'y1="{y + 10}" y2="{y + 10}"/>'
        )
    for value in one.values:
        yield f'<circle class="dot {color}" cx="{x(value):.1f}" cy="{y + 10}" r="3"/>'
    if one.middle is not None:
        at = x(one.middle)
        yield (
            f'<line class="middle {color}" x1="{at:.1f}" x2="{at:.1f}" y1="{y + 2}" y2="{y + 18}"/>'
        )


def lines(title: str, x_unit: str, y_unit: str, series: Sequence[Marks]) -> str:
    """A line a row, of its values over the numbers of the rounds."""
    top = max((max(one.values) for one in series), default=1.0) * 1.05
    count = max((len(one.values) for one in series), default=1)
    inner = HEIGHT - FOOT - 24

    def at(number: int, value: float) -> str:
        across = 44 + number / max(1, count - 1) * (WIDTH - 44 - RIGHT)
        return f"{across:.1f},{24 + inner * (1 - value / top):.1f}"

    parts = [_text(LEFT, 14, y_unit, "unit")]
    for tick in ticks(0, top):
        y = 24 + inner * (1 - tick / top)
        parts.append(f'<line class="grid" x1="44" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(40, y + 4, f"{tick:g}", "tick", "end"))
    for number in range(0, count, max(1, count // 8)):
        across = at(number, 0).partition(",")[0]
        parts.append(_text(float(across), HEIGHT - FOOT + 16, str(number + 1), "tick", "middle"))
    for one in series:
        points = " ".join(at(n, value) for n, value in enumerate(one.values))
        parts.append(
            f'<polyline class="line c{one.color % 6}" points="{points}">'
            f"<title>{escape(one.label)}</title></polyline>"
        )
    parts.append(_text(WIDTH / 2, HEIGHT - 6, x_unit, "unit", "middle"))
    return _svg(title, HEIGHT, parts)


def roofline(
    title: str,
    x_unit: str,
    y_unit: str,
    roof: tuple[float, float],
    points: Sequence[tuple[int, float, float]],
) -> str:
    """Points (colour, operations a byte, operations a second) below a roof: (bytes a second,
    operations a second), on logarithmic axes."""
    ridge = roof[1] / roof[0]
    xs, ys = [ridge, *(p[1] for p in points)], [roof[1], *(p[2] for p in points)]
    left, right = math.log10(min(xs)) - 0.3, math.log10(max(xs)) + 0.6
    bottom, top = math.log10(min(ys)) - 0.4, math.log10(max(ys)) + 0.3
    inner = HEIGHT - FOOT - 24

    def at(intensity: float, rate: float) -> tuple[float, float]:
        across = (math.log10(intensity) - left) / (right - left)
        down = 1 - (math.log10(rate) - bottom) / (top - bottom)
        return 44 + across * (WIDTH - 44 - RIGHT), 24 + inner * min(1.0, down)

    start = max(10**left, 10**bottom / roof[0])
    corners = (at(start, start * roof[0]), at(ridge, roof[1]), at(10**right, roof[1]))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    parts = [_text(LEFT, 14, y_unit, "unit"), f'<polyline class="roof" points="{path}"/>']
    for power in range(math.ceil(bottom), math.floor(top) + 1):
        y = at(ridge, 10.0**power)[1]
        parts.append(f'<line class="grid" x1="44" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(40, y + 4, f"1e{power}", "tick", "end"))
    for tick in (n * 10.0**p for p in range(math.floor(left), math.ceil(right)) for n in (1, 3)):
        if left <= math.log10(tick) <= right:
            across = at(tick, roof[1])[0]
            parts.append(_text(across, HEIGHT - FOOT + 16, f"{tick:g}", "tick", "middle"))
    for color, intensity, rate in points:
        x, y = at(intensity, rate)
        parts.append(f'<circle class="point c{color % 6}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
    parts.append(_text(WIDTH / 2, HEIGHT - 6, x_unit, "unit", "middle"))
    return _svg(title, HEIGHT, parts)


def scatter(title: str, x_unit: str, y_unit: str, points: Sequence[Point]) -> str:
    """Points with their labels over two axes; that of y begins at 0."""
    left, right = min(p.x for p in points), max(p.x for p in points)
    pad = (right - left or abs(right) or 1.0) * 0.1
    left, right, top = left - pad, right + pad, max(p.y for p in points) * 1.1
    inner = HEIGHT - FOOT - 24

    def across(x: float) -> float:
        return 44 + (x - left) / (right - left) * (WIDTH - 44 - RIGHT)

    parts = [_text(LEFT, 14, y_unit, "unit")]
    for tick in ticks(0, top):
        y = 24 + inner * (1 - tick / top)
        parts.append(f'<line class="grid" x1="44" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(40, y + 4, f"{tick:g}", "tick", "end"))
    parts += [
        _text(across(tick), HEIGHT - FOOT + 16, f"{tick:g}", "tick", "middle")
        for tick in ticks(left, right)
    ]
    for one in points:
        x, y = across(one.x), 24 + inner * (1 - one.y / top)
        anchor, off = ("end", -9) if x > WIDTH / 2 else ("start", 9)
        parts.append(f'<circle class="point c{one.color % 6}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(_text(x + off, y + 4, one.label, "label", anchor))
    parts.append(_text(WIDTH / 2, HEIGHT - 6, x_unit, "unit", "middle"))
    return _svg(title, HEIGHT, parts)


def _vertical(x: float, bottom: float, label: str) -> Iterator[str]:
    yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>'
    yield _text(x, bottom + 14, label, "tick", "middle")


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
