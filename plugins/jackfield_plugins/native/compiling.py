"""One C++ file becomes one shared library, kept in the user's cache by all that it depends on."""

from __future__ import annotations

import contextlib
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
import tempfile
from pathlib import Path

from jackfield.contracts.private_files import CACHE
from jackfield.errors import shown
from jackfield_plugins.native.keeping import (
    KeepingError,
    cache_root,
    keep,
    kept,
    making,
    own_folder,
)

logger = logging.getLogger("jackfield")

SHARED = Path(__file__).parent  # headers that kernels include
SOURCE = "kernel.cpp"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
OPENMP = ("libgomp", "libomp", "libiomp5")  # of GCC, LLVM and Intel; all have GCC's entry
SECONDS = 180  # of a compiler that hangs; ours takes 20 on a slow core that is its own


class CompilingError(Exception):
    """Says why there is no library, and what to do."""


def compiler() -> list[str] | None:
    """The command that `CXX` names, or the first known compiler; None where there is none."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation without an end is no command
        return None
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    return None


def library(
    name: str, folder: Path, command: list[str], instead: str, defines: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """The library made of `folder`'s kernel, from the cache or now. Raises CompilingError."""
    command = [*command, *(f"-D{macro}" for macro in defines)]
    try:
        path = own_folder(cache_root()) / f"{name}-{key(folder, command)}.so"
    except KeepingError as error:
        raise CompilingError(str(error)) from None
    if not isinstance(found := _found(name, path), str):
        return found
    with making(path, SECONDS):
        if not isinstance(found := _found(name, path), str):  # who was waited for has made it
            return found
        if found:
            logger.warning("%s %s; the kernel of %s is compiled anew", path, found, name)
        logger.info("compiling the kernel of %s, once on this machine, with %s", name, command[0])
        return _made(name, folder, command, path, instead)


def _found(name: str, path: Path) -> ctypes.CDLL | str:
    """What is kept in `path`; or why it is not taken, which is "" where nothing is."""
    content = kept(path)
    if not isinstance(content, bytes):
        return content or ""
    try:
        return _loaded(name, content)
    except OSError as error:
        return f"does not load ({error})"


def _loaded(name: str, content: bytes) -> ctypes.CDLL:
    """The very bytes that were looked at, as a library. Raises OSError.

    They lie in memory: a file that is cut off while its code runs would end this process.
    """
    _share_threads()
    memory = os.memfd_create(name)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(content)
        # Not closed: the next library would get this number, and the loader goes by names.
        return ctypes.CDLL(f"/proc/self/fd/{memory}")
    except OSError:
        os.close(memory)
        raise


@functools.cache
def _share_threads() -> None:
    """Let libraries find the OpenMP that torch loaded; on ARM torch keeps it to itself."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :]
        if not Path(path).name.startswith(OPENMP):
            continue
        with contextlib.suppress(OSError):  # one that is deleted has no name any more
            if hasattr(ctypes.CDLL(path), "GOMP_parallel"):
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return


def key(folder: Path, command: list[str]) -> str:
    """Stands for all that the binary depends on: sources, flags, compiler and processor."""
    whole = hashlib.sha256()
    for source in (folder / SOURCE, *sorted(SHARED.glob("*.h")), *sorted(folder.glob("*.h"))):
        whole.update(source.read_bytes())
    version = run([*command, "--version"]).stdout
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


def _made(name: str, folder: Path, command: list[str], path: Path, instead: str) -> ctypes.CDLL:
    """Compile, load, and only then keep it in `path`."""
    advice = f"choose another compiler with CXX, or {instead}"
    try:
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=path.parent) as temporary:
            fresh = Path(temporary, path.name)
            source = str(folder / SOURCE)
            done = run([*command, *FLAGS, "-I", str(SHARED), source, "-o", str(fresh)])
            if done.returncode or not fresh.is_file():
                raise CompilingError(
                    f"{shlex.join(command)} cannot compile its kernel "
                    f"({_first_error(done.stderr)}); {advice}"
                )
            content = fresh.read_bytes()
        try:
            made = _loaded(name, content)
        except OSError as error:
            raise CompilingError(
                f"the kernel that {shlex.join(command)} compiled does not load ({error}); {advice}"
            ) from None
        keep(path, content)
    except OSError as error:
        raise CompilingError(
            f"its kernel cannot be stored in {path.parent} ({error.strerror}); set {CACHE} to a "
            "folder that can be written"
        ) from None
    return made


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
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    if errors[:1] and errors[0].startswith("collect2:"):  # it only says that the linker failed
        errors = lines[: lines.index(errors[0])][-1:] or errors
    return shown((errors or lines or ["no message"])[0])
