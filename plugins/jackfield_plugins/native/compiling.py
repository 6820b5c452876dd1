"""One C++ file becomes one shared library in the user's cache, named after all it depends on."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger("jackfield")

SHARED = Path(__file__).parent  # headers that kernels include
SOURCE = "kernel.cpp"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
CACHE = "XDG_CACHE_HOME"
SECONDS = 60


class CompilingError(Exception):
    """Says why there is no library, and what to do."""


def compiler() -> list[str] | None:
    """The command that `CXX` names, or the first known compiler; None where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    return None


def compiled(name: str, folder: Path, command: list[str], instead: str) -> Path:
    """The library made of `folder`'s kernel, from the cache or now."""
    path = _cache() / f"{name}-{key(folder, command)}.so"
    if not path.is_file():
        logger.info("compiling the kernel of %s, once on this machine, with %s", name, command[0])
        _compile(folder, command, path, instead)
    return path


def key(folder: Path, command: list[str]) -> str:
    """Stands for all that the binary depends on: sources, flags, compiler and processor."""
    whole = hashlib.sha256()
    for source in (folder / SOURCE, *sorted(SHARED.glob("*.h")), *sorted(folder.glob("*.h"))):
        whole.update(source.read_bytes())
    version = run([*command, "--version"]).stdout
    for part in (*command, *FLAGS, version, _processor()):
        whole.update(b"\0" + part.encode())
    return whole.hexdigest()[:16]


def _cache() -> Path:
    try:
        return Path(os.environ.get(CACHE) or Path.home() / ".cache") / "jackfield"
    except RuntimeError:
        raise CompilingError(
            f"there is no home folder for its compiled kernel; set {CACHE} to a folder that can "
            "be written"
        ) from None


def _processor() -> str:
    """What `-march=native` looks at: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    found = sorted({line for line in lines if line.split("\t")[0].rstrip(": ") in wanted})
    return "\n".join([platform.machine(), *found])


def _compile(folder: Path, command: list[str], path: Path, instead: str) -> None:
    """Make `path` in one step, as another process may be compiling the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=path.parent) as temporary:
            fresh = Path(temporary, path.name)
            source = str(folder / SOURCE)
            done = run([*command, *FLAGS, "-I", str(SHARED), source, "-o", str(fresh)])
            if done.returncode:
                raise CompilingError(
                    f"{shlex.join(command)} cannot compile its kernel "
                    f"({_first_error(done.stderr)}); choose another compiler with CXX, or {instead}"
                )
            fresh.replace(path)
    except OSError as error:
        raise CompilingError(
            f"its kernel cannot be stored in {path.parent} ({error.strerror}); set {CACHE} to a "
            "folder that can be written"
        ) from None


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
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
        raise CompilingError(f"{command[0]} does not run ({error}); set CXX") from None
    return subprocess.CompletedProcess(command, process.returncode, *output)


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if "error" in line] or stderr.splitlines()
    return lines[0][:200] if lines else "no message"
