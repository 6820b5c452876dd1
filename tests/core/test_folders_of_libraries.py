"""Every command where the folders that libraries write to are missing, or cannot be written.

Root writes anywhere, so what cannot be written is below a file, or where the kernel makes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import extras
import pytest
from forking import Forks

from jackfield.cli.app import COMMANDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/null, /proc and fork")

#: Imported once for all commands of a surrounding, within it; each then runs in a process.
IMPORTED = ("jackfield.api", "transformers.models.llama.modeling_llama", "kernels", "filelock")

VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
BELOW = "/dev/null/below"

KERNEL = "hub?repo=kernels-community/flash-attn2&revision=v1"
INT4 = "int4-cpu?head=8"
NEW = None if extras.missing("copier") is None else "jackfield[new]"
SERVE = None if extras.missing("fastapi") is None else "pip install jackfield[serve]"
BATCH = str(Path(__file__).parents[2] / "docs/snippets/batch.jsonl")
#: command -> (arguments, standard input, what the one line of an error says)
LINES: dict[str, tuple[tuple[str, ...], str, str | None]] = {
    "version": (("--version",), "", None),
    "generate": (("generate", "--chat", "Hello!"), "", None),
    "generate of the hub": (
        ("generate", "Hi", "--model", "no/such"),
        "",
        "cannot find the model 'no/such'",
    ),
    "chat": (("chat",), "Hello!\n", None),
    "eval": (("eval", "--count", "1"), "", None),
    "plugins": (("plugins",), "", None),
    "explain": (("explain", "demo"), "", None),
    "explain a kernel of the hub": (("explain", "demo", "--attention", KERNEL), "", "kernel"),
    "memory": (("memory", "demo"), "", None),
    "trace": (("trace", "--prompt", "Hi", "--max-new-tokens", "2"), "", None),
    "tune": (("tune", "--budget", "0"), "", "write 90s, 2m or 1h"),
    "doctor": (("doctor",), "", None),
    "new": (("new", "attention", "my-kernel"), "", NEW),
    "check": (("check", "fifo", "--only", "schedule.again"), "", None),
    "lock": (("lock", "--json"), "", None),
    "serve": (("serve", "--new-key", "ann"), "", SERVE),
    "batch": (("batch", BATCH, "out.jsonl", "--json"), "", SERVE),
}
#: What is compiled has to be kept, so these name the variable where it cannot be.
KEEPING: dict[str, tuple[str, ...]] = {
    "generate with int4": ("generate", "Hi", "--quantization", INT4, "--max-new-tokens", "2"),
    "explain with inductor": ("explain", "demo", "--compile", "inductor"),
    "warm": ("warm", "--rows", "1"),
}
#: surrounding -> (what each variable is, whether something can be kept)
SURROUNDINGS: dict[str, tuple[str, bool]] = {
    "below a file": (BELOW, False),
    "a name that is too long": (f"/tmp/{'x' * 300}", False),
    "relative": ("here", False),
    "empty": ("", True),
    "missing": ("MADE/a/b", True),
}


def test_every_command_is_swept() -> None:
    swept = {arguments[0] for arguments, *_ in (*LINES.values(), *((k,) for k in KEEPING.values()))}
    assert swept >= set(COMMANDS)


def environment(folder: Path, value: str, names: tuple[str, ...] = VARIABLES) -> dict[str, str]:
    # Not this process's own path, where other tests may have put packages of theirs.
    say = "import os, sys; print(os.pathsep.join(filter(None, sys.path)))"
    fresh = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    path = fresh.stdout.strip()
    named = {name: value.replace("MADE", str(folder)) for name in names}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **named}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.long
def test_no_command_stumbles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value, keeps = SURROUNDINGS[name]
    env = environment(tmp_path, value)
    lines = {**LINES, **{line: (told, "", None) for line, told in KEEPING.items()}}
    if not keeps:
        lines |= {line: (told, "", "set XDG_CACHE_HOME to") for line, told in KEEPING.items()}
    monkeypatch.chdir(tmp_path)
    forks, wrong = Forks(*IMPORTED, env=env), []
    try:
        for line, (arguments, told, error) in lines.items():
            done = forks.run(
                [sys.executable, "-m", "jackfield", *arguments], env=env, timeout=100, input=told
            )
            err = done.stderr.decode()
            if error is None:
                fine = done.returncode == 0 and "rror" not in err and bool(done.stdout)
            else:
                fine = done.returncode == 2 and err.startswith("error: ") and error in err
                fine = fine and err.count("\n") == 1 and "unexpected" not in err
            if not fine:
                said = [n for n in done.stdout.decode().splitlines() if "  ok  " not in n]
                wrong.append((line, done.returncode, said, err))
    finally:
        forks.close()
    assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("variable", VARIABLES)
def test_one_folder_that_cannot_be_written_is_enough_for_nothing(
    variable: str, tmp_path: Path
) -> None:
    """Each variable by itself: a text, by whatever way is left."""
    env = environment(tmp_path, BELOW, (variable,))
    command = [sys.executable, "-m", "jackfield", "generate", "--chat", "Hello!"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "Hello! How can I help you?\n"), done.stderr


DILL = importlib.util.find_spec("dill") is not None
WITHOUT_TEMPORARY_FILES = """
import sys, tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc/nothing"]
from jackfield.cli import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(("command", "code"), [("plugins", 0), ("explain", 2 if DILL else 0)])
def test_without_any_folder_for_temporary_files(command: str, code: int) -> None:
    """dill needs one when it is imported, and torch imports it where it is there."""
    model = ["demo"] if command == "explain" else []
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TEMPORARY_FILES, command, *model],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if code:
        said = "error: no folder for temporary files can be written; set TMPDIR to one that can\n"
        assert (done.stdout, done.stderr) == ("", said)
