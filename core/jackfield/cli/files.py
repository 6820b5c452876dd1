"""What a command is given as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.errors import UsageError, shown

if TYPE_CHECKING:
    from pathlib import Path


def read_file(file: Path) -> bytes:
    """Raises UsageError."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {shown(file)}: {error.strerror}") from None


def decoded(data: bytes, origin: str) -> str:
    """UTF-8 text. Raises UsageError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin} is not UTF-8 text (byte {error.start}); convert it") from None
