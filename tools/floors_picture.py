"""Draw docs/floors.svg from the imports of core: a box for each floor, an arrow for what it uses.

python tools/floors_picture.py
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parents[1]
PICTURE = HERE / "docs/floors.svg"
TEST = HERE / "tests/core/test_floors.py"

WIDTH, ROW, GAP, LEFT, BOX = 780, 40, 14, 16, 560


def floors() -> ModuleType:
    """The test that holds the floors; it knows their order, and reads the imports."""
    spec = importlib.util.spec_from_file_location("floors", TEST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw() -> str:
    read = floors()
    rows = [floor.split(" ") for floor in reversed(read.FLOORS) if floor not in ("__main__", "")]
    place = {room: number for number, row in enumerate(rows) for room in row}
    uses = Counter(
        (place[one], place[other])
        for one, other in (tuple(n.partition(".")[0] for n in arrow) for arrow in read.ARROWS)
        if one in place and other in place and place[one] < place[other]
    )
    height = len(rows) * (ROW + GAP) + GAP
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif" role="img">'
        ),
        "<title>The floors of jackfield: imports go down only</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *(arc for (one, other), count in sorted(uses.items()) for arc in _arc(one, other, count)),
        *(box for number, row in enumerate(rows) for box in _box(number, row)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box(number: int, rooms: list[str]) -> Iterator[str]:
    top = GAP + number * (ROW + GAP)
    what = _purpose(rooms[0]) if len(rooms) == 1 else ""
    yield (
        f'<rect x="{LEFT}" y="{top}" width="{BOX}" height="{ROW}" rx="5" fill="#eef3f8" '
        'stroke="#5b7fa3"/>'
    )
    yield (
        f'<text x="{LEFT + 10}" y="{top + 17}" font-size="14" font-weight="bold" fill="#16324f">'
        f"{' · '.join(rooms)}</text>"
    )
    yield f'<text x="{LEFT + 10}" y="{top + 33}" font-size="11" fill="#33475b">{what}</text>'


def _arc(one: int, other: int, count: int) -> Iterator[str]:
    """From the right side of a floor down to that of one below; thicker for more imports."""
    from_y, to_y = (GAP + number * (ROW + GAP) + ROW / 2 for number in (one, other))
    x, reach = LEFT + BOX, 26 + 17 * (other - one)
    width = 0.7 if count < 4 else 1.6 if count < 12 else 3  # so that few changes redraw it
    yield (
        f'<path d="M{x} {from_y:g} C{x + reach} {from_y:g} {x + reach} {to_y:g} {x + 6} {to_y:g}" '
        f'fill="none" stroke="#8aa6c1" stroke-opacity="0.7" stroke-width="{width}"/>'
    )
    yield f'<path d="M{x} {to_y:g} l8 -4 v8 z" fill="#5b7fa3"/>'


def _purpose(room: str) -> str:
    """The first sentence of what a room says of itself."""
    core = HERE / "core/jackfield"
    path = core / room / "__init__.py" if (core / room).is_dir() else core / f"{room}.py"
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = re.split(r"[.:] ", " ".join(said.split("\n\n")[0].split()))[0].rstrip(".")
    return sentence.replace("&", "&amp;").replace("<", "&lt;").replace("`", "")


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
