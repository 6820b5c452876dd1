"""Each flag that names a file or a folder, with paths that nothing can be read from or written to.

Each is refused in one short line, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from jackfield.cli.app import app
from jackfield.paths import why_no_file, why_no_folder

if TYPE_CHECKING:
    from command_line import Cli

BAD = {
    "a zero byte": "a\0b",
    "a long name": "x" * 5000,
    "too many folders": "a/" * 3000,
    "below a file": "/dev/null/x",
    "nothing": "",
}
#: What other arguments a command wants before it looks at its paths.
OTHERS = {
    "check": ["plugin:sdpa"],
    "new": ["attention", "own"],
    "batch": ["/dev/null", "out.jsonl"],
}


def path_flags() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command and flag whose value is a path; those that many commands share, of one."""

    def walk(command: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        nested = getattr(command, "commands", None)
        if nested is None:
            yield name, command
        for each, inner in (nested or {}).items():
            yield from walk(inner, (*name, each))

    for name, command in walk(typer.main.get_command(app), ()):
        for parameter in command.params:
            told = getattr(parameter, "type_descriptor", None)  # of newer versions of typer
            typed = "Path" in (str(told.annotation) if told else type(parameter.type).__name__)
            shared = name == ("explain",) and parameter.metavar in ("FILE", "FOLDER", "ADAPTER")
            if parameter.param_type_name == "option" and (typed or shared):
                yield name, parameter.opts[0]


FLAGS = list(path_flags())


def test_the_flags_are_found() -> None:
    assert {(("explain",), "--offload-folder"), (("lock",), "--output")} <= set(FLAGS)
    assert len(FLAGS) >= 12


@pytest.mark.parametrize(
    ("command", "flag"), FLAGS, ids=lambda one: one if isinstance(one, str) else " ".join(one)
)
@pytest.mark.one_in(4)
def test_a_path_that_cannot_be(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], flag: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()  # a new package wants a folder of its own
    for what, path in BAD.items():
        if "\0" in path:  # which no argument of a process can have
            continue
        done = cli(*command, flag, path, *OTHERS.get(command[0], []), stdin="")
        assert done.code == 2, (what, done)
        assert done.err.startswith("error: "), (what, done.err)
        assert done.err.count("\n") == 1, (what, done.err)
        assert "unexpected" not in done.err, (what, done.err)
        assert len(done.err) < 2000, what


@pytest.mark.parametrize("what", ["a zero byte", "a long name", "below a file"])
def test_why_no_folder_and_no_file(tmp_path: Path, what: str) -> None:
    for given in (Path(BAD[what]), tmp_path / BAD[what]):
        below = what == "below a file"
        assert why_no_folder(given), given
        assert why_no_file(given) or below, given
    assert why_no_folder(tmp_path) is None
    assert why_no_folder(tmp_path / "new" / "below") is None
    assert why_no_file(tmp_path / "new") is None
    assert why_no_file(tmp_path) == "it is a folder"
    assert why_no_file(tmp_path / "new" / "x") == f"there is no folder {tmp_path / 'new'}"
    (tmp_path / "file").touch()
    assert why_no_folder(tmp_path / "file") == "it is not a folder"
    assert why_no_folder(tmp_path / "file" / "x") == f"{tmp_path / 'file'} is not a folder"
    assert why_no_file(tmp_path / "file") is None
