"""The contracts are the ground: backends need nothing else of core, and they nothing above."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield import contracts

ROOT = Path(__file__).parents[2]
CONTRACTS = sorted((ROOT / "core/jackfield/contracts").glob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))

#: What a backend may import of core; `demo` is data: a small model and texts.
FOR_BACKENDS = {"contracts", "errors", "demo"}
BELOW_CONTRACTS = {"contracts", "devices", "errors", "guarded", "quieting", "spelling", "units"}


def rooms(path: Path) -> Iterator[str]:
    """Which parts of core a file imports, lazily or for typing as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "jackfield":
            names = [f"jackfield.{name.name}" for name in node.names]
        else:
            names = [getattr(node, "module", None) or ""]
        yield from (name.split(".")[1] for name in names if name.startswith("jackfield."))


@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.stem)
def test_contracts_import_nothing_above_them(path: Path) -> None:
    assert set(rooms(path)) <= BELOW_CONTRACTS


def test_built_in_backends_stand_on_the_contracts_alone() -> None:
    public = {"hookimpl"}
    beside = {
        str(path.relative_to(ROOT)): more
        for path in PLUGINS
        if (more := set(rooms(path)) - FOR_BACKENDS - public)
    }
    assert beside == {}


@pytest.mark.parametrize(
    "modules", ["jackfield.contracts", "jackfield.testing.process, jackfield.testing.report"]
)
def test_these_come_in_without_torch(modules: str) -> None:
    """What a backend is made of, and what `jackfield check` needs outside the checks."""
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_of_contracts_shows_every_class_of_them() -> None:
    shown = set(re.findall(r"\w+", (ROOT / "docs/contracts.md").read_text()))
    classes = {name for name in contracts.__all__ if isinstance(getattr(contracts, name), type)}
    assert classes <= shown
