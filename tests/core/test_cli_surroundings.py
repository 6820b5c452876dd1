"""Every command where output is ASCII, full, closed or gone, and under `python -O` and `-OO`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jackfield.cli.app import COMMANDS

if TYPE_CHECKING:
    from command_line import Cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full and POSIX shells")

BATCH = str(Path(__file__).parents[2] / "docs/snippets/batch.jsonl")
#: command -> (arguments, standard input)
LINES: dict[str, tuple[tuple[str, ...], str]] = {
    "help": (("--help",), ""),
    "generate --help": (("generate", "--help"), ""),
    "version": (("--version",), ""),
    "generate": (("generate", "--chat", "Hello!"), ""),
    "generate --json": (("generate", "Once …", "--json", "--max-new-tokens", "2"), ""),
    "chat": (("chat",), "Hello!\n/reset\nWhat is 1 + 1?\n"),
    "eval": (("eval", "--count", "1"), ""),
    "plugins": (("plugins",), ""),
    "explain": (("explain", "demo"), ""),
    "explain --json": (("explain", "demo", "--json"), ""),
    "memory": (("memory", "demo"), ""),
    "doctor": (("doctor",), ""),
    "new": (("new", "attention", "my-kernel"), ""),
    "check": (("check", "fifo", "--only", "schedule.again"), ""),
    "lock": (("lock", "--json"), ""),
    "warm": (("warm", "--rows", "1"), ""),
    "tune": (
        (
            "tune",
            "--requests",
            "1",
            "--prompt-tokens",
            "8",
            "--new-tokens",
            "2",
            "--attention",
            "sdpa",
            "--cache",
            "dynamic",
            "--compile",
            "none",
            "--dtype",
            "float32",
        ),
        "",
    ),
    "trace": (("trace", "--cold", "--max-new-tokens", "2"), ""),
    "serve": (("serve", "--new-key", "ann"), ""),
    "batch": (("batch", BATCH, "out.jsonl", "--json"), ""),
    "mistake": (("generate", "hi", "--attention", "nope…"), ""),
}
#: What they do is told on standard error, step by step.
TELLING = ("tune",)
#: What has nothing to say on standard output.
SILENT = ("mistake", "warm")


#: Without what a container or a shell of ours may set: such output never waits to be written.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@functools.cache
def environment(line: str) -> dict[str, str]:
    """A cache of its own for graphs: where they lie, `auto` takes `native`, in other tests too."""
    if line != "warm":
        return BUFFERED
    return BUFFERED | {"XDG_CACHE_HOME": tempfile.mkdtemp(prefix="warmed-")}


@dataclass(frozen=True)
class Done:
    code: int
    out: bytes
    err: str


def python(*flags: str, **environ: str) -> Callable[[str], Done]:
    def run(line: str) -> Done:
        arguments, told = LINES[line]
        done = subprocess.run(
            [sys.executable, *flags, "-m", "jackfield", *arguments],
            input=told.encode(), capture_output=True, env=environment(line) | environ, timeout=300,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr.decode())

    return run


def shell(redirection: str) -> Callable[[str], Done]:
    def run(line: str) -> Done:
        arguments, told = LINES[line]
        done = subprocess.run(
            ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, "-m", "jackfield",
             *arguments],
            input=told.encode(), capture_output=True, env=environment(line), timeout=300,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr.decode())

    return run


def plain(line: str, done: Done) -> None:
    assert done.code == (2 if line == "mistake" else 0)
    assert done.out.decode("ascii").strip() or line in SILENT
    assert done.err.isascii()


def full(line: str, done: Done) -> None:
    if line == "mistake":
        assert (done.code, done.err.count("\n")) == (2, 1)
        return
    assert (done.code, done.out) == (int(line not in SILENT), b"")
    if line in SILENT:
        return
    last = "error: the output cannot be written: No space left on device\n"
    assert done.err.endswith(last) if line in TELLING else done.err == last


def nothing_said(line: str, done: Done) -> None:
    assert done.code == (2 if line == "mistake" else 0)
    assert done.err == ""


def closed(line: str, done: Done) -> None:
    assert done.code == (2 if line == "mistake" else 0)
    assert done.out == b""


def gone(line: str, done: Done) -> None:
    assert done.code in ((2,) if line == "mistake" else (0, 1))
    most = 1 if line == "mistake" else 3  # a summary an answer
    assert line in TELLING or done.err.count("\n") <= most


def optimized(line: str, done: Done) -> None:
    assert done.code == (2 if line == "mistake" else 0)


def without_docstrings(line: str, done: Done) -> None:
    if line in ("help", "generate --help", "version", "plugins", "doctor", "new"):
        assert done.code == 0
        assert "Example: jackfield generate" in done.out.decode() or line != "generate --help"
    else:
        assert done.code == 2
        # What it imports is compiled anew, and Python 3.12 says first what it thinks of it.
        assert "\nerror: Python runs with -OO, which takes away docstrings" in f"\n{done.err}"


ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SURROUNDINGS: dict[str, tuple[Callable[[str], Done], Any]] = {
    "ascii": (python(**ASCII), plain),
    "C locale": (python(**C_LOCALE), plain),
    "full": (shell(">/dev/full"), full),
    "full errors": (shell("2>/dev/full"), nothing_said),
    "closed": (shell(">&-"), closed),
    "all closed": (shell("<&- >&- 2>&-"), lambda line, done: None),
    "gone": (shell("> >(exec <&-)"), gone),
    "-O": (python("-O"), optimized),
    "-OO": (python("-OO"), without_docstrings),
}
QUICK = {("generate", "full"), ("generate", "full errors"), ("generate --help", "-OO")}
LIGHT = ("version", "plugins")  # the others import transformers, which takes seconds each
CELLS = [
    pytest.param(
        line,
        name,
        marks=() if (line, name) in QUICK or line in LIGHT else pytest.mark.long,
        id=f"{line}-{name}",
    )
    for line in LINES
    for name in SURROUNDINGS
]


def test_every_command_is_swept() -> None:
    assert {arguments[0] for arguments, _ in LINES.values()} >= set(COMMANDS)


@pytest.mark.parametrize(("line", "name"), CELLS)
@pytest.mark.one_in(4)
def test_a_command_in_its_surroundings(
    line: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where some write what they make
    run, check = SURROUNDINGS[name]
    done = run(line)
    assert "Traceback" not in done.err
    assert "Exception ignored" not in done.err
    assert done.code in (0, 1, 2)
    check(line, done)


@pytest.mark.parametrize("columns", ["0", "1", "5", "19", "-5", "x", "1000000"])
@pytest.mark.parametrize("line", ["generate --help", "plugins", "explain", "memory", "doctor"])
@pytest.mark.one_in(5)
def test_any_number_of_columns(
    cli: Cli, line: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut off, wherever lines are broken."""

    def said() -> str:
        done = cli(*LINES[line][0])
        assert done.err == ""
        assert done.code in ((0, 1) if line == "doctor" else (0,))  # it may find something here
        return "".join(sorted(char for char in done.out if char.isalpha()))

    monkeypatch.setenv("COLUMNS", "200")
    wide = said()
    monkeypatch.setenv("COLUMNS", columns)
    assert said() == wide


@pytest.mark.parametrize("line", ["generate", "explain", "memory", "eval", "chat", "batch"])
def test_a_folder_that_is_gone(
    cli: Cli, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where MKL would end the process."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    arguments, told = LINES[line]
    cli(*arguments, stdin=told).assert_failed(2, "current folder is gone")


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """What is opened first would get number 1, and whatever prints there would write into it."""
    code = (
        "import os, sys; from jackfield import cli; cli._keep_streams(); "
        f"sys.exit(os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY) < 3)"
    )
    done = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code])
    assert done.returncode == 0
