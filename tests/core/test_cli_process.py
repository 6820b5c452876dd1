"""The command line as processes of their own: imports, pipes, signals, colours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

COMMAND = (sys.executable, "-m", "jackfield")
HELLO = "Hello! How can I help you?"


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, **options)


def test_listing_plugins_imports_nothing_heavy() -> None:
    code = (
        "import sys; from jackfield.cli import run; code = run(['plugins', '--json']); "
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'pydantic'}; "
        "sys.exit(code or ' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["plugins"]


def test_a_whole_process() -> None:
    done = process("generate", "--chat", input="Hello!\n")
    assert (done.returncode, done.stdout) == (0, f"{HELLO}\n")
    (line,) = done.stderr.splitlines()  # ours, and none of a library
    assert re.search(r" · \d+ tokens, ", line)


@pytest.mark.long  # each such process imports transformers for seconds; "mistake" is like it
def test_a_whole_process_that_fails() -> None:
    done = process("generate", "hi", "--set", "sequence_bias=[[[1], NaN]]")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX pipe")
@pytest.mark.parametrize(
    "arguments", [("plugins",), pytest.param(("generate", "hi"), marks=pytest.mark.long)]
)
def test_a_reader_that_goes_away_is_no_traceback(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_ends_a_whole_process() -> None:
    endless = ("generate", "Once", "--set", "min_new_tokens=400", "--max-new-tokens", "400")
    with subprocess.Popen(
        [*COMMAND, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as p:
        assert p.stdout is not None
        assert p.stderr is not None
        shown = p.stdout.read(1)
        p.send_signal(signal.SIGINT)
        shown += p.stdout.read()
        assert p.stderr.read() == b""
    assert p.returncode == 130
    assert shown.endswith(b"\n")


def test_no_color_is_honoured() -> None:
    coloured = {**os.environ, "FORCE_COLOR": "1"}
    coloured.pop("NO_COLOR", None)
    assert "\x1b[32m" in process("plugins", env=coloured).stdout
    plain = process("plugins", env={**coloured, "NO_COLOR": "1"}).stdout
    assert not re.search(r"\x1b\[[39]\d", plain)
