"""Draw docs/pictures/steps.svg from the table of docs/benchmarks.md: steps and what bounds them.

python tools/steps_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parents[1]
PAGE, PICTURE = HERE / "docs/benchmarks.md", HERE / "docs/pictures/steps.svg"
TITLE = "## Against llama.cpp"
#: What is drawn: the column of the table, its name, its colour.
BARS = ((4, "jackfield", "#1f5fa8"), (5, "llama.cpp", "#8a6d1d"), (6, "generate", "#9aa0a6"))
LIMIT, ROWS = 7, 3


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    part = PAGE.read_text().split(TITLE, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def draw(found: list[list[str]]) -> Figure:
    figure = Figure(figsize=(8, 0.45 * len(found) + 1), layout="constrained")
    axes = figure.add_subplot()
    for number, (column, name, color) in enumerate(BARS):
        places = [at + (number - 1) * 0.27 for at in range(len(found))]
        times = [float(row[column]) / float(row[LIMIT]) for row in found]
        bars = axes.barh(places, times, height=0.25, color=color, label=name)
        axes.bar_label(bars, [f"{float(row[column]):.3g} ms" for row in found], padding=3, size=8)
    names = [f"{row[0]} {row[1]}, {row[ROWS]} row{'s'[: row[ROWS] != '1']}" for row in found]
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=1)
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("a decode step, in times of reading the weights once")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper center", ncols=len(BARS))
    return figure


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "steps"  # the same figures are the same file
    draw(rows()).savefig(PICTURE, metadata={"Date": None})
