"""Core cannot import the built-ins, and nobody can import the folder `core`: lint forbids it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def banned(source: str, filename: str) -> bool:
    """Whether the project's own ruff configuration bans `source` when it stands in `filename`."""
    options = ["--select=TID251", "--output-format=concise", "--no-cache"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, "--stdin-filename", filename, "-"],
        input=source,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    assert ("TID251" in done.stdout) == (done.returncode == 1), done.stdout
    return done.returncode == 1


IMPORTS_OF_PLUGINS = [
    "import jackfield_plugins\n",
    "from jackfield_plugins.attention import sdpa\n",
    "def late():\n    import jackfield_plugins.cache.dynamic\n",
]


@pytest.mark.parametrize("source", IMPORTS_OF_PLUGINS)
def test_core_does_not_import_plugins(source: str) -> None:
    assert banned(source, "core/jackfield/x.py")
    assert banned(source, "core/jackfield/cli/x.py")


@pytest.mark.parametrize("source", IMPORTS_OF_PLUGINS)
@pytest.mark.parametrize("filename", ["plugins/jackfield_plugins/x.py", "tests/plugins/test_x.py"])
def test_plugins_and_tests_may(source: str, filename: str) -> None:
    assert not banned(source, filename)


@pytest.mark.parametrize("source", ["import core\n", "from core.jackfield import errors\n"])
@pytest.mark.parametrize(
    "filename", ["core/jackfield/x.py", "plugins/jackfield_plugins/x.py", "tests/test_x.py"]
)
def test_nobody_imports_the_folder(source: str, filename: str) -> None:
    assert banned(source, filename)


def test_the_rule_is_selected() -> None:
    """`banned` asks for TID251 by name; `make lint` must, too."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-settings", "core/jackfield"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "(TID251)" in done.stdout
