"""The page: well-formed, nothing from outside, units on every plot, what is invalid marked."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from made_runs import FAST, LIMITS, SLOW, row, run

from jackfield.benchmarking import plots
from jackfield.benchmarking.page import INVALID, html
from jackfield.benchmarking.results import Benchmark
from jackfield.benchmarking.saved import compare

EVIL = "<script>alert('x')</script> & \"more\""


def whole() -> Benchmark:
    return run(
        row("sdpa", FAST),
        row(EVIL, SLOW),
        row("lying", FAST, reasons=("wrong tokens in 1 of 2 texts",)),
        replace(row("generate_batch", SLOW, "generate_batch"), limits=None, peak_bytes=None),
        row("never loaded", [], reasons=("refused: no such thing",)),
    )


def figures(page: str) -> dict[str, ET.Element]:
    found = re.findall(r"<figure><h2>(.*?)</h2>(<svg.*?</svg>)</figure>", page, re.S)
    return {title: ET.fromstring(svg) for title, svg in found}


def test_every_plot_says_its_units() -> None:
    drawn = figures(html(whole()))
    assert len(drawn) == 7
    units = {title: [t.text for t in svg.iter("text") if t.get("class") == "unit"]
             for title, svg in drawn.items()}  # fmt: skip
    assert units["How fast"] == ["tokens/s, a dot a round"]
    assert units["Round by round"] == ["ms a round", "round"]
    assert units["Under the roof of cpu float32"] == [
        "operations/s", "operations a byte that must be read",
    ]  # fmt: skip
    assert all(units.values())


def test_what_is_invalid_is_marked_in_every_table_and_plot() -> None:
    page = html(whole())
    assert page.count("wrong tokens in 1 of 2 texts") >= 1
    assert page.count('class="invalid">invalid<') == 2
    for title, svg in figures(page).items():
        texts = [text.text for text in svg.iter("text")]
        if "lying" in texts:
            assert texts.count(INVALID) == 2, title
        assert len(list(svg.iter("circle"))) != len(FAST) * 5, title


def test_nothing_is_fetched_and_nothing_runs() -> None:
    page = html(whole(), compare(whole(), whole()))
    assert not re.search(r"https?://|<script|<link|@import|url\(", page.replace("alert", ""))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_base_that_is_no_result_compares_nothing() -> None:
    drawn = figures(html(run(row("a", FAST, reasons=("wrong",)), row("b", FAST))))
    assert "Beside a" not in drawn


@pytest.mark.parametrize("count", [1, 5, 6, 40])
def test_any_number_of_rounds_is_drawn(count: int) -> None:
    found = run(row("a", (FAST * 4)[:count]), row("b", (SLOW * 4)[:count]))
    assert figures(html(found))


def test_marks_stay_within_the_picture() -> None:
    for svg in figures(html(whole())).values():
        width, height = (float(n) for n in str(svg.get("viewBox")).split()[2:])
        for mark in svg.iter("circle"):
            assert 0 <= float(mark.get("cx", -1)) <= width
            assert 0 <= float(mark.get("cy", -1)) <= height
        for text in svg.iter("text"):
            assert 0 <= float(text.get("x", -1)) <= width
            assert 0 <= float(text.get("y", -1)) <= height


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.003), (0.9, 1.4), (0, 12345), (0.99, 1.001)]
)
def test_ticks_are_round_and_few(low: float, high: float) -> None:
    found = plots.ticks(low, high)
    assert 2 <= len(found) <= 7
    assert low - 1e-9 <= found[0]
    assert found[-1] <= high + 1e-9
    assert all(len(f"{tick:g}") <= 6 for tick in found)


def test_a_point_below_the_roof_is_drawn_below_it() -> None:
    roof = LIMITS["bandwidth"], LIMITS["flop_rate"]
    points = [(0, 1.0, 1e8), (1, 1.0, 3.9e10)]
    svg = ET.fromstring(plots.roofline("r", "x", "y", roof, points))  # type: ignore[arg-type]
    heights = [float(point.get("cy", 0)) for point in svg.iter("circle")]
    assert heights[0] > heights[1]


def test_a_row_has_one_colour_in_all_plots() -> None:
    third = row("third", SLOW)
    drawn = figures(html(run(row("first", FAST), row("bad", FAST, reasons=("no",)), third)))
    for title, svg in drawn.items():
        kinds = {str(mark.get("class")).split()[-1] for mark in svg.iter() if mark.get("class")}
        colors = {kind for kind in kinds if re.fullmatch(r"c\d", kind)}
        assert colors == ({"c2"} if title == "Beside first" else {"c0", "c2"}), title
