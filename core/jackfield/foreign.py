"""Files that a stranger wrote, read so that each fault of theirs is named.

Nothing here waits for a pipe, reads a device, or takes more memory than it is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jackfield.errors import CheckpointError, UsageError, first_line, quoted

MEBIBYTE = 1 << 20
DEPTH = 100  # levels in a JSON file; real ones have a dozen


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """`path`, open for reading. Raises CheckpointError where it is no plain file."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is not a file; fetch it again")
            yield file
    except (OSError, ValueError) as error:  # ValueError: no path has a zero byte
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be read ({reason}); fetch it again") from None


def read_json(path: Path, most: int = 16 * MEBIBYTE) -> dict[str, Any]:
    """The JSON object in `path`, a file of at most `most` bytes. Raises CheckpointError."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(f"{path} has more than {most:,} bytes, which no such file needs")
    return parsed(content, str(path))


def parsed(content: bytes, origin: str) -> dict[str, Any]:
    """The JSON object that `content` is; `origin` is what errors call it.

    As transformers reads it: the last of equal keys counts, and NaN and Infinity are numbers.
    Raises CheckpointError, also for what would fail later: half a surrogate pair, which cannot be
    printed, and more than `DEPTH` levels, which cannot be copied.
    """
    try:
        found = json.loads(content.decode())
        complaint = None if isinstance(found, dict) else "it is not a JSON object"
        complaint = complaint or _complaint(found)
    except UnicodeDecodeError as error:
        complaint = f"byte {error.start} is not UTF-8"
    except RecursionError:
        complaint = f"it has more than {DEPTH} levels"
    except ValueError as error:
        complaint = first_line(error)
    if complaint:
        raise CheckpointError(f"{origin} is not valid JSON: {complaint}; fetch it again")
    return found  # type: ignore[no-any-return]


def _complaint(data: Any) -> str | None:
    """What the rest of the program could not live with."""
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > DEPTH:
            return f"it has more than {DEPTH} levels"
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += (*value, *value.values())
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and not value.isascii() and not _whole(value):
                return f"half a surrogate pair in {quoted(value)}"
        level = below
    return None


def _whole(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextlib.contextmanager
def named(what: str, kind: type[UsageError] = CheckpointError) -> Iterator[None]:
    """Tell what a library raises over a stranger's file as an error of `kind` that begins so.

    Also what is no Exception, such as a panic of the tokenizers' library.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {error_line(error)}") from error


def error_line(error: BaseException) -> str:
    """Its first line; of an error that says no more than a key, also what it is."""
    line = first_line(error)
    return f"{type(error).__name__}: {line}" if isinstance(error, KeyError) else line
