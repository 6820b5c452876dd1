"""A test that is skipped for want of a library says which extra brings it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import extras
import pytest

ROOT = Path(__file__).parents[2]


def unexplained(source: str) -> list[int]:
    """The lines that skip where an import fails, and do not say why."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.importorskip"
        and "reason" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_skip_for_want_of_a_library_names_the_extra() -> None:
    files = {path.relative_to(ROOT): path for path in (ROOT / "tests").rglob("*.py")}
    found = {name: unexplained(path.read_text()) for name, path in files.items()}
    assert {str(name): lines for name, lines in found.items() if lines} == {}
    assert unexplained('import pytest\npytest.importorskip("peft")') == [2]


def test_the_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.EXTRAS.values()) <= set(project["optional-dependencies"])


def test_what_is_missing_is_named_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "here", lambda library: library == "peft")
    assert extras.missing("peft") is None
    assert extras.missing("triton", "peft", "uvicorn") == "needs jackfield[serve,triton]"
    with pytest.raises(pytest.skip.Exception, match=r"needs jackfield\[client\]"), extras.imports():
        raise ModuleNotFoundError("No module named 'httptools.parser'", name="httptools.parser")
    for mistake in ("typo", "peft.typo"):
        with pytest.raises(ModuleNotFoundError), extras.imports():
            raise ModuleNotFoundError(f"No module named {mistake!r}", name=mistake)
