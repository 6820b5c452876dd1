"""Files that one user alone may write, since they decide which code is loaded.

Several processes may read and write one of them at once: a file is complete, or does not exist.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

CACHE = "XDG_CACHE_HOME"
_WRITERS = stat.S_IWGRP | stat.S_IWOTH
# A pipe without a writer is not waited for, and a link is not followed to what others may write.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_HAS_OWNERS = hasattr(os, "geteuid")  # and modes that tell who may write


class NotPrivateError(OSError):
    """Why somebody else may have written a file: its text goes on after the file's name."""


def cache_folder() -> Path | None:
    """jackfield's folder among the user's caches; None: there is no home. It may not exist yet."""
    if not os.environ.get(CACHE) and os.environ.get("HOME") == "":
        return None
    try:
        return Path(os.environ.get(CACHE) or Path.home() / ".cache") / "jackfield"
    except RuntimeError:
        return None


def make_folder(path: Path) -> None:
    """Make `path`, and what is missing above it, for this user alone. Raises OSError.

    A folder that is there stays as it is.
    """
    for folder in (*reversed(path.parents), path):
        if folder.is_dir():
            continue
        try:  # another process may make it at the same time
            folder.mkdir(mode=0o700, exist_ok=True)  # less what the umask forbids
        except FileExistsError:
            raise NotADirectoryError(0, f"{folder} is not a folder") from None


def write(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, in one step, with mode 600; its folder is made. Raises OSError.

    Where it cannot be written, what was there before stays.
    """
    make_folder(path.parent)
    handle, fresh = tempfile.mkstemp(prefix="writing-", dir=path.parent)  # mode 600
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(fresh, path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def read(path: Path) -> bytes:
    """The content of a file that nobody else may have written.

    All is asked of the open file, so that nothing can be put in its place between two questions.
    Raises FileNotFoundError, NotPrivateError, or another OSError where it cannot be read.
    """
    with open(os.open(path, _READ), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivateError("is not a file")
        if not is_ours(found):
            raise NotPrivateError(f"belongs to somebody else (user {found.st_uid})")
        if is_shared(found):
            raise NotPrivateError("can be written by others")
        return file.read()


def is_ours(found: os.stat_result) -> bool:
    """Whether it belongs to this user, or to root, who may write everything."""
    return not _HAS_OWNERS or found.st_uid in (os.geteuid(), 0)


def is_shared(found: os.stat_result) -> bool:
    """Whether its mode lets others write."""
    return _HAS_OWNERS and bool(found.st_mode & _WRITERS)
