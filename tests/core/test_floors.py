"""Imports of core go down only, lazy ones and those for types included, and none in a circle."""

from __future__ import annotations

import ast
import re
import runpy
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import jackfield

ROOT = Path(jackfield.__file__).parent

#: From the ground up; "" is the face, which nothing imports.
FLOORS = (
    "errors quieting demo", "units spelling guarded foreign devices paths", "contracts",
    "hookspecs", "requests", "parallel", "registry", "sampling", "bridge", "parsing", "planning",
    "tracing", "engine", "api", "estimates", "benchmarking", "tuning", "in_transformers",
    "testing authoring client serving", "batch replicas", "cli", "__main__", "",
)  # fmt: skip
HEIGHT = {room: height for height, floor in enumerate(FLOORS) for room in floor.split(" ")}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module(path): path for path in ROOT.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """The modules of core that a file names in any import; "" is `jackfield` itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant):  # for importlib, or for a process of its own
            names = [node.value] if str(node.value).removeprefix("jackfield.") in FILES else []
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            top, *rest = name.split(".")
            while rest and ".".join(rest) not in FILES:
                rest.pop()
            found |= {".".join(rest)} if top == "jackfield" else set()
    return found - {module(path)}


ARROWS = {(name, other) for name, path in FILES.items() for other in imports_of(path)}


def height(name: str) -> int:
    return HEIGHT[name.partition(".")[0]]


def test_every_room_has_a_floor() -> None:
    assert {name.partition(".")[0] for name in FILES} == HEIGHT.keys()


def test_the_page_of_the_architecture_has_the_floors_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    table = page.partition("## The floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.M)
    told = [[name.strip("/") for name in re.findall(r"`(.*?)(?:\.py)?`", row)] for row in rows]
    listed = [floor.split(" ") for floor in FLOORS if floor != "__main__"]
    assert [sorted(row) for row in told[::-1]] == [
        sorted(f or "__init__" for f in floor) for floor in listed
    ]


def test_imports_go_down() -> None:
    assert sorted((a, b) for a, b in ARROWS if height(a) < height(b)) == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = TopologicalSorter[str]()
    for name, other in ARROWS:
        files.add(name, other)
    try:
        files.prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_picture_is_drawn_from_these_imports() -> None:
    root = Path(__file__).parents[2]
    tool = runpy.run_path(str(root / "tools/floors_picture.py"))
    assert (root / "docs/floors.svg").read_text() == tool["draw"](), "run tools/floors_picture.py"
