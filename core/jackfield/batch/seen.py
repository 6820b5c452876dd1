"""What a file held when it was looked through, and whether it still does."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from jackfield.errors import ExecutionError

CHUNK = 1024 * 1024  # bytes


class Seen:
    """What a file held when it was looked through: the SHA-256 and the number of lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._mark = _mark_of(file.fileno())
            self.digest, self.lines = _looked_through(file)

    def check(self, place: Path | int) -> None:
        """Raise ExecutionError where a file, or what stands at a path, holds something else now."""
        if (mark := _mark_of(place)) == self._mark:
            return
        with self._path.open("rb") as file:
            if _looked_through(file)[0] != self.digest:
                raise ExecutionError(
                    f"{self._path} was changed while the job ran; what is answered stays there: "
                    "put back what it held, and run the same command again"
                )
        self._mark = mark


def _mark_of(place: Path | int) -> tuple[int, ...]:
    """What is another where a file was written to, or another one stands in its place."""
    found = os.stat(place)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _looked_through(file: BinaryIO) -> tuple[str, int]:
    """The SHA-256 of a file, and how many lines it has."""
    whole, lines, last = hashlib.sha256(), 0, b"\n"
    while chunk := file.read(CHUNK):
        whole.update(chunk)
        lines += chunk.count(b"\n")
        last = chunk[-1:]
    return whole.hexdigest(), lines + (last != b"\n")
