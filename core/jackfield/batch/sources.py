"""Where lines come from: JSON lines, or the rows of a Parquet file, read as they are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from jackfield.batch import parquet
from jackfield.batch.seen import CHUNK, Seen
from jackfield.errors import UsageError, shown
from jackfield.serving.errors import ApiError, refused
from jackfield.serving.json_bodies import read_json

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
        none. Blank lines are left out. Raises ExecutionError, before a line that is another is
        given, where the file was changed since it was opened.
        """


def open_source(path: Path, most: int, depth: int) -> Source:
    """The lines of a file; of one that ends in .parquet its rows.

    A line of more than `most` bytes, or nested deeper than `depth`, is an error. Raises UsageError
    for a file that cannot be read.
    """
    try:
        if not path.is_file():
            raise UsageError(f"{path} is not a file; give a file of lines in OpenAI's batch format")
        seen = Seen(path)
    except OSError as error:
        raise UsageError(f"cannot read {shown(path)}: {error.strerror}") from None
    if parquet.is_parquet(path):
        return parquet.Rows(path, seen, most, depth)
    return JsonLines(path, seen, most, depth)


class JsonLines:
    def __init__(self, path: Path, seen: Seen, most: int, depth: int) -> None:
        self.digest, self.total = seen.digest, seen.lines
        self._path, self._seen, self._most, self._depth = path, seen, most, depth

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = 0
        with self._path.open("rb") as file:
            while line := self._next(file):
                number += 1
                whole = len(line) <= self._most or line.endswith(b"\n")
                if not whole:
                    _skip_line(file)
                text = line.removeprefix(_MARK) if number == 1 else line
                if text.strip():
                    yield number, self._value(text) if whole else self._too_long()

    def _next(self, file: BinaryIO) -> bytes:
        """The next line, or the beginning of one that is too long; empty at the end."""
        line = file.readline(self._most + 1)
        self._seen.check(file.fileno())
        return line

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
