"""Where compiled code is kept, and how nothing but what was put there comes out again.

Code that is loaded runs as its user. So the folder is this user's alone, and a library carries a
digest: one that was cut off, changed, renamed or put there by somebody else is not loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jackfield.contracts import private_files
from jackfield.contracts.private_files import CACHE
from jackfield.errors import shown

DIGEST = hashlib.sha256().digest_size
UNREAD = 90 * 24 * 3600.0  # seconds
UNFINISHED = 24 * 3600.0  # after which whoever began to write is no more


class KeepingError(Exception):
    """Says why compiled code cannot be kept, and what to do."""


def own_folder(path: Path, variable: str = CACHE) -> Path:
    """`path`, made if need be, after making sure that nobody else may write there.

    `variable` can name another. Raises KeepingError.
    """
    _check_absolute(path, variable)
    try:
        private_files.make_folder(path)
        _check_own(path, variable)
    except OSError as error:
        raise _unusable(path, variable, error) from None
    return path


def cache_root() -> Path:
    """jackfield's folder among the user's caches; it may not exist yet. Raises KeepingError."""
    folder = private_files.cache_folder()
    if folder is None:
        raise KeepingError(
            "there is no home folder to keep what is compiled in; set "
            f"{CACHE} to a folder that can be written"
        )
    return folder


def check_usable(path: Path, variable: str) -> None:
    """Raise KeepingError where `path`, which `variable` can change, can be no folder for compiled
    code: it is no folder and cannot become one, or others may write there. Makes nothing.
    """
    _check_absolute(path, variable)
    try:
        there = next(folder for folder in (path, *path.parents) if _is_there(folder))
        if not there.is_dir():
            raise NotADirectoryError(0, f"{there} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(0, f"{there} cannot be written")
        if there == path:
            _check_own(path, variable)
    except OSError as error:
        raise _unusable(path, variable, error) from None


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_absolute(path: Path, variable: str) -> None:
    if not path.is_absolute():
        raise KeepingError(f"{shown(path)} is not an absolute path; set {variable} to one")


def _unusable(path: Path, variable: str, error: OSError) -> KeepingError:
    return KeepingError(
        f"what is compiled cannot be kept in {shown(path)} ({error.strerror}); set {variable} to "
        "a folder that can be written"
    )


def _check_own(path: Path, variable: str) -> None:
    """Raise KeepingError where somebody else may put code into the folder, or replace it."""
    found = path.stat()
    if not private_files.is_ours(found):
        raise KeepingError(
            f"{path}, from which compiled code is loaded, belongs to somebody else (user "
            f"{found.st_uid}); set {variable} to a folder of your own"
        )
    if private_files.is_shared(found):
        raise KeepingError(
            f"others can write to {path}, from which compiled code is loaded; make it yours alone "
            f"(chmod 700), or set {variable} to another folder"
        )


def kept(path: Path) -> bytes | str | None:
    """The content that `keep` wrote to `path`; None: there is no such file; a text: why not."""
    try:
        whole = private_files.read(path)
    except FileNotFoundError:
        return None
    except private_files.NotPrivateError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    content, digest = whole[:-DIGEST], whole[-DIGEST:]
    if _digest(path.name, content) != digest:
        return "is damaged, or was changed"
    with contextlib.suppress(OSError):  # it may be read, and not written
        os.utime(path)
    return content


@contextlib.contextmanager
def making(path: Path, seconds: float) -> Iterator[None]:
    """While what will be kept in `path` is made here, others who would make it wait.

    Threads and processes; after `seconds`, or where there are no locks, they go on all the same.
    """
    lock = path.with_suffix(".lock")
    file = _locked(lock, time.monotonic() + seconds)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                lock.unlink()
            _unlock(file)


def _locked(path: Path, until: float) -> TextIO | None:
    """The file, which this thread alone has now; None: it cannot be had."""
    import fcntl  # where nothing is compiled, there may be none

    with contextlib.suppress(OSError):  # who makes it says what is wrong with the folder
        while time.monotonic() < until:
            file = path.open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file  # else who had it before has taken it away
            except BlockingIOError:
                time.sleep(0.05)
            except FileNotFoundError:
                pass
            except OSError:
                file.close()
                raise
            file.close()
    return None


def _unlock(file: TextIO) -> None:
    import fcntl

    with contextlib.suppress(OSError), file:  # a process that was forked meanwhile has it as well
        fcntl.flock(file, fcntl.LOCK_UN)


def keep(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step, as another process may do the same. Raises OSError."""
    private_files.write(path, content + _digest(path.name, content))
    _forget_beside(path)


def _forget_beside(path: Path) -> None:
    """Remove what nobody has read for long, of other versions and models, which nobody will, and
    what processes had begun that were killed.
    """
    for other in path.parent.glob(f"*{path.suffix}"):
        with contextlib.suppress(OSError):
            if _age(other) > UNREAD:
                other.unlink()
    patterns = ("compiling-*", "writing-*", "*.lock")
    for begun in (one for pattern in patterns for one in path.parent.glob(pattern)):
        with contextlib.suppress(OSError):
            if _age(begun) > UNFINISHED:
                shutil.rmtree(begun) if begun.is_dir() else begun.unlink()


def _age(path: Path) -> float:
    """Seconds since it was written or read."""
    return time.time() - path.lstat().st_mtime


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
