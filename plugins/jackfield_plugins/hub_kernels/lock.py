"""The lock file: which bytes each kernel had when it was first used here."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from jackfield.contracts import private_files
from jackfield_plugins.hub_kernels import KernelRefused

VARIABLE = "JACKFIELD_KERNEL_LOCK"


def lock_path() -> Path:
    """Where the lock file is: the environment's choice, or the user's configuration folder.

    Raises KernelRefused where there is no home folder.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        return _settings() / "jackfield" / "kernels.lock.json"
    except RuntimeError:
        raise KernelRefused(
            f"there is no home folder for the lock file of kernels; name one with {VARIABLE}"
        ) from None


def _settings() -> Path:
    """Where a user's settings are on this system. Raises RuntimeError: there is no home."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def digest(folder: Path) -> str:
    """The SHA-256 of the names and contents of all files, but for the bytecode Python leaves."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_symlink() and path.is_dir():
            raise KernelRefused(
                f"{path} is a link to a folder, whose content cannot be vouched for"
            )
        if "__pycache__" in name.parts or not path.is_file():
            continue
        content = hashlib.sha256(path.read_bytes()).digest()
        whole.update(name.as_posix().encode() + b"\0" + content)
    return f"sha256:{whole.hexdigest()}"


def check(kernel: str, found: str) -> None:
    """Raise KernelRefused where the lock file knows `kernel` with another content."""
    known = _read().get(kernel)
    if known is not None and known != found:
        raise KernelRefused(
            f"its content has changed: {kernel} is {found[:19]}… and was {known[:19]}… when it was "
            f"first used; if you know why, delete its entry in {lock_path()}"
        )


def record(kernel: str, found: str) -> None:
    """Remember the content of `kernel`, where the lock file does not know it yet."""
    from filelock import FileLock

    path = lock_path()
    try:
        private_files.make_folder(path.parent)
        with FileLock(f"{path}.busy"):
            known = _read()
            if known.setdefault(kernel, found) != found:
                check(kernel, found)
            text = json.dumps({"version": 1, "kernels": dict(sorted(known.items()))}, indent=2)
            private_files.write(_followed(path), f"{text}\n".encode())
    except OSError as error:
        raise KernelRefused(
            f"its content cannot be recorded in {path} ({error.strerror}); set {VARIABLE} to a "
            "file that can be written"
        ) from None


def _followed(path: Path) -> Path:
    """A user's settings may be links into another folder, and stay links."""
    return Path(os.path.realpath(path))


def _read() -> dict[str, str]:
    path = lock_path()
    try:
        content = private_files.read(_followed(path))
    except FileNotFoundError:
        return {}
    except private_files.NotPrivateError as error:
        raise KernelRefused(
            f"the lock file {path} {error}; make it yours alone (chmod 600), or name another with "
            f"{VARIABLE}"
        ) from None
    except OSError as error:
        raise KernelRefused(f"the lock file {path} cannot be read ({error.strerror})") from None
    try:
        kernels = json.loads(content.decode())["kernels"]
        if all(isinstance(part, str) for pair in kernels.items() for part in pair):
            return dict(kernels)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise KernelRefused(f"the lock file {path} is broken; mend it, or delete it to begin anew")
