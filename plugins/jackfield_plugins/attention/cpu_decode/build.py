"""Compile the kernel with the machine's C++ compiler, once a machine, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from jackfield.errors import PlanError

logger = logging.getLogger("jackfield")

FOLDER = Path(__file__).parent
SOURCES = ("kernel.cpp", "vectors.h")
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
CACHE = "XDG_CACHE_HOME"
SECONDS = 60

_failures: dict[tuple[str | None, str | None], list[str]] = {}


def compiler() -> list[str] | None:
    """The command that `CXX` names, or the first known compiler; None where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    return None


def cannot_build() -> list[str]:
    """Why there can be no kernel on this machine."""
    if not sys.platform.startswith("linux"):
        return [f"is for Linux, where it shares torch's threads; this is {sys.platform}"]
    if compiler() is None:
        named = f" (CXX={os.environ['CXX']} is not one)" if os.environ.get("CXX") else ""
        reason = "needs a C++ compiler (g++ or clang++) to compile its kernel once, and finds none"
        return [f"{reason}{named}: install one, e.g. `apt install g++`"]
    return []


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel of this machine; compiled, which takes some seconds, if it never was before."""
    command = compiler()
    if command is None:
        raise PlanError(f"cpu_decode {cannot_build()[0]}")
    path = _folder() / f"cpu_decode-{_key(command)}.so"
    if not path.is_file():
        logger.info("compiling the kernel of cpu_decode, once on this machine, with %s", command[0])
        _compile(command, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise PlanError(
            f"cpu_decode: the compiled kernel does not load ({error}); delete {path} to compile it "
            "anew, or choose 'sdpa'"
        ) from None


def cannot_load() -> list[str]:
    """Why the kernel that can be built cannot be had; compiles it if it never was before.

    A failure is remembered while the process lives: a compiler may take long to fail.
    """
    where = (os.environ.get("CXX"), os.environ.get(CACHE))
    if where not in _failures:
        try:
            library()
        except PlanError as error:
            _failures[where] = [str(error).removeprefix("cpu_decode: ")]
    return _failures.get(where, [])


def built_with() -> str:
    """What reports say."""
    return f"its own kernel, compiled by {shlex.join(compiler() or [])}"


def _folder() -> Path:
    try:
        return Path(os.environ.get(CACHE) or Path.home() / ".cache") / "jackfield"
    except RuntimeError:
        raise PlanError(
            f"cpu_decode: there is no home folder for its compiled kernel; set {CACHE} to a folder "
            "that can be written"
        ) from None


def _key(command: list[str]) -> str:
    """Stands for all that the binary depends on: source, flags, compiler and processor."""
    whole = hashlib.sha256()
    for name in SOURCES:
        whole.update((FOLDER / name).read_bytes())
    version = _run([*command, "--version"]).stdout
    for part in (*command, *FLAGS, version, _processor()):
        whole.update(b"\0" + part.encode())
    return whole.hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` looks at: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    found = sorted({line for line in lines if line.split("\t")[0].rstrip(": ") in wanted})
    return "\n".join([platform.machine(), *found])


def _compile(command: list[str], path: Path) -> None:
    """Make `path` in one step, as another process may be compiling the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=path.parent) as folder:
            fresh = Path(folder, path.name)
            done = _run([*command, *FLAGS, str(FOLDER / SOURCES[0]), "-o", str(fresh)])
            if done.returncode:
                raise PlanError(
                    f"cpu_decode: {shlex.join(command)} cannot compile its kernel "
                    f"({_first_error(done.stderr)}); choose another compiler with CXX, or 'sdpa'"
                )
            fresh.replace(path)
    except OSError as error:
        raise PlanError(
            f"cpu_decode: its kernel cannot be stored in {path.parent} ({error.strerror}); set "
            f"{CACHE} to a folder that can be written"
        ) from None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    process = None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        output = process.communicate(timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        if process is not None:  # a compiler has children, which would go on
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise PlanError(f"cpu_decode: {command[0]} does not run ({error}); set CXX") from None
    return subprocess.CompletedProcess(command, process.returncode, *output)


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if "error" in line] or stderr.splitlines()
    return lines[0][:200] if lines else "no message"
