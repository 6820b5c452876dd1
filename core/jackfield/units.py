"""Sizes and rates as people write them."""

from __future__ import annotations

import math
import re

from jackfield.errors import UsageError
from jackfield.spelling import nearest

_SHOWN = ("bytes", "kB", "MB", "GB", "TB")
_UNITS = {"B": 1} | {
    f"{prefix}{end}": base**power
    for end, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("kMGT", 1)
}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)")


def in_units(count: int) -> str:
    """1234567 as '1.2 MB'."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_SHOWN) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_SHOWN[unit]}" if unit else f"{count} bytes"


def in_milliseconds(seconds: float | None) -> str:
    """0.0123 as '12 ms', two digits more below 10; "-" for None."""
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


def parse_bytes(size: object, what: str) -> int:
    """'24GB' as 24000000000, '24GiB' as 24 * 1024**3; a whole number is bytes.

    Raises UsageError, which says `what` it was asked for.
    """
    count: float = size if type(size) is int else 0
    unit = ""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        unit = match[2].replace("K", "k", 1)
        count = float(match[1]) * _UNITS.get(unit, 0)
    if not 1 <= count < math.inf:
        raise UsageError(
            f"{what} must be a size such as 24GB or 512MiB, not {size!r}"
            f"{nearest(unit, _UNITS) if unit and unit not in _UNITS else ''}"
        )
    return int(count)


def parse_bandwidth(rate: str | float) -> float:
    """'3.35TB/s' in bytes a second; a number is that already. Raises UsageError."""
    wrong = f"bandwidth must be a rate such as 80GB/s or 3.35TB/s, not {rate!r}"
    if not isinstance(rate, str):
        if isinstance(rate, bool) or not 1 <= rate < math.inf:
            raise UsageError(wrong)
        return float(rate)
    size, mark, unit = rate.rpartition("/")
    if not mark or unit.strip() != "s":
        raise UsageError(wrong)
    try:
        return float(parse_bytes(size, "bandwidth"))
    except UsageError:
        raise UsageError(wrong) from None
