"""Paths that a caller gives, judged before anything is read or written there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jackfield.errors import UsageError


def check_here() -> None:
    """Raise UsageError where the current folder is gone.

    transformers cannot be imported there, and MKL, which torch computes with, ends the process.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the current folder is gone (deleted or moved), and nothing can be computed there; "
            "change to another one"
        ) from None


def why_no_folder(path: Path) -> str | None:
    """Why `path` is no folder and cannot become one; None: it is, or can be made. Makes nothing."""
    whole = path.absolute()
    for folder in (whole, *whole.parents):
        try:
            found = folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            return _reason(error)
        if stat.S_ISDIR(found.st_mode):
            return None
        return f"{'it' if folder == whole else folder} is not a folder"
    return None


def why_no_file(path: Path) -> str | None:
    """Why nothing can be written to `path`: it is a folder, or in none; None: it may be."""
    whole = path.absolute()
    try:
        if stat.S_ISDIR(whole.stat().st_mode):
            return "it is a folder"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        return _reason(error)
    return None if whole.parent.is_dir() else f"there is no folder {whole.parent}"


def _reason(error: OSError | ValueError) -> str:
    """ValueError: no path has a zero byte."""
    return getattr(error, "strerror", None) or str(error)
