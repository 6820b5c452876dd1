"""Files of results: JSON lines that are appended, and whole again after whatever ended the job."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

from jackfield.errors import ExecutionError, UsageError
from jackfield.serving.schema.common import as_json

K = TypeVar("K", bound=Hashable)


def write_whole(file: FileIO, data: bytes, end: int) -> None:
    """Write `data` at the end of a file of `end` bytes, or leave it as it is. Raises OSError."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:
        file.truncate(end)
        raise


def fresh(path: Path) -> Path:
    """Where a file is written that then takes the place of `path`."""
    return path.with_name(f"{path.name}.writing")


class Results(Generic[K]):
    """A file of lines, each of which has a key.

    What is in it already is read; a last line that is torn is cut off, and lines of which
    `key` says None are taken out. There is no file before the first line.

    Raises UsageError for a file with other lines, or with two of one key; ExecutionError where it
    cannot be written: what was appended before is in it then, and nothing else.
    """

    def __init__(self, path: Path, key: Callable[[Any], K | None]) -> None:
        self._path, self._key = path, key
        self._places: dict[K, int] = {}  # where each line begins
        self._end = 0  # bytes
        self._file: FileIO | None = None
        with self._told():
            if path.exists():
                self._read()

    def __contains__(self, key: K) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[K]:
        return iter(self._places)

    def _read(self) -> None:
        dropped = False
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    os.truncate(self._path, self._end)
                    break
                key = self._key_of(line, number)
                if key is None:
                    dropped = True
                else:
                    self._places[key] = self._end
                self._end += len(line)
        if dropped:
            self._rewrite(self._places)

    def _key_of(self, line: bytes, number: int) -> K | None:
        try:
            key = self._key(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UsageError(
                f"line {number} of {self._path} is not one that a batch job writes; put back what "
                "was there, or give another file for the output"
            ) from None
        if key in self._places:
            raise UsageError(f"line {number} of {self._path} is there twice; take it out")
        return key

    def append(self, key: K, record: Any) -> None:
        """Write one line; whatever ends the process after this, the line is there."""
        data = as_json(record).encode() + b"\n"
        with self._told():
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - `close` does
            write_whole(self._file, data, self._end)
        self._places[key] = self._end
        self._end += len(data)

    def arrange(self, keys: Sequence[K]) -> None:
        """Put the lines into the order of `keys`, which are all of them, in one step."""
        places = [self._places[key] for key in keys]
        if places != sorted(places):
            with self._told():
                self._rewrite(keys)

    def _rewrite(self, keys: Iterable[K]) -> None:
        """Keep the lines of these keys, in their order."""
        self.close()
        found: dict[K, int] = {}
        end = 0
        new = fresh(self._path)
        try:
            with open(self._path, "rb") as lines, open(new, "wb") as file:
                for key in keys:
                    lines.seek(self._places[key])
                    found[key] = end
                    end += file.write(lines.readline())
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        finally:
            new.unlink(missing_ok=True)
        self._places, self._end = found, end
        if not found:
            self._path.unlink()

    def close(self) -> None:
        """Have it on the disk."""
        if self._file is not None:
            with self._told(), self._file as file:
                self._file = None
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ExecutionError(
                f"{self._path} cannot be written: {error.strerror}; what is answered stays there: "
                "mend it, and run the same command again"
            ) from None
