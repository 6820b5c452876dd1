"""Sizes and rates as people write them."""

from __future__ import annotations

import math
import re

from jackfield.errors import UsageError

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kMGT]?)(i?)B", re.IGNORECASE)


def in_units(count: int) -> str:
    """1234567 as '1.2 MB'."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"


def parse_bytes(text: str | float, what: str) -> int:
    """'24GB' as 24000000000, '24GiB' as 24 * 1024**3; a number is bytes. `what` was asked for.

    Raises UsageError.
    """
    if isinstance(text, str):
        match = _SIZE.fullmatch(text.strip())
        number, prefix, binary = match.groups() if match else ("0", "", "")
        count = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    else:
        count = 0.0 if isinstance(text, bool) else float(text)
    if not 1 <= count < math.inf:
        raise UsageError(f"{what} must be a size such as 24GB or 512MiB, not {text!r}")
    return int(count)


def parse_bandwidth(text: str | float) -> float:
    """'3.35TB/s' in bytes a second; a number is that already. Raises UsageError."""
    whole, mark, unit = text.rpartition("/") if isinstance(text, str) else (text, "/", "s")
    if not mark or unit.strip() != "s":
        raise UsageError(f"bandwidth must be a rate such as 80GB/s or 3.35TB/s, not {text!r}")
    try:
        return float(parse_bytes(whole, "bandwidth"))
    except UsageError:
        raise UsageError(
            f"bandwidth must be a rate such as 80GB/s or 3.35TB/s, not {text!r}"
        ) from None
