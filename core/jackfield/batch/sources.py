"""Where lines come from: JSON lines, or the rows of a Parquet file, read as they are wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from jackfield.batch import parquet
from jackfield.errors import UsageError
from jackfield.serving.errors import ApiError, refused
from jackfield.serving.json_bodies import read_json

CHUNK = 1024 * 1024  # bytes
_MARK = b"\xef\xbb\xbf"  # the byte order mark with which some editors begin a file


class Source(Protocol):
    """Lines of the input.

    Attributes:
        total: How many there are, about: blank ones may count.
        digest: SHA-256 of the file.
    """

    total: int
    digest: str

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """(number of the line from 1, its JSON value).

        In the place of a value, or of that of `body`, may be the ApiError that says why there is
        none. Blank lines are left out.
        """


def open_source(path: Path, most: int, depth: int) -> Source:
    """The lines of a file; of one that ends in .parquet its rows.

    A line of more than `most` bytes, or nested deeper than `depth`, is an error. Raises UsageError
    for a file that cannot be read.
    """
    try:
        if not path.is_file():
            raise UsageError(f"{path} is not a file; give a file of lines in OpenAI's batch format")
        digest, total = _looked_through(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if parquet.is_parquet(path):
        return parquet.Rows(path, digest, most, depth)
    return JsonLines(path, digest, total, most, depth)


def _looked_through(path: Path) -> tuple[str, int]:
    """The SHA-256 of a file, and how many lines it has."""
    whole, lines, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            whole.update(chunk)
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return whole.hexdigest(), lines + (last != b"\n")


class JsonLines:
    def __init__(self, path: Path, digest: str, total: int, most: int, depth: int) -> None:
        self.digest, self.total = digest, total
        self._path, self._most, self._depth = path, most, depth

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = 0
        with self._path.open("rb") as file:
            while line := file.readline(self._most + 1):
                number += 1
                whole = len(line) <= self._most or line.endswith(b"\n")
                if not whole:
                    _skip_line(file)
                text = line.removeprefix(_MARK) if number == 1 else line
                if text.strip():
                    yield number, self._value(text) if whole else self._too_long()

    def _too_long(self) -> ApiError:
        return refused(f"the line has more than {self._most} bytes", None)

    def _value(self, line: bytes) -> Any:
        try:
            return read_json(line, self._depth)
        except ApiError as error:
            return in_a_line(error)


def _skip_line(file: BinaryIO) -> None:
    while (chunk := file.readline(CHUNK)) and not chunk.endswith(b"\n"):
        pass


def in_a_line(error: ApiError) -> ApiError:
    """What is said of a body, of a line."""
    return refused(error.message.replace("the body", "the line", 1), error.param, error.code)
