"""Numbers among settings: read, and checked against what they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jackfield.errors import SettingsError, quoted

#: What to write where -1 was meant as other engines mean it.
_MINUS_ONE = {
    "max_new_tokens": "each text has a bound; name one, such as 512",
    "top_k": "0 keeps all",
    "seed": "leave it out for any",
}
LARGEST = 3.4e38  # what float32, in which settings reach the device, can hold


def plain(value: Any) -> Any:
    """A number of Python's own for a scalar of numpy and a tensor without dimensions."""
    if isinstance(value, bool | int | float | str | None):
        return value
    try:
        shape = getattr(value, "shape", None)
        return value.item() if isinstance(shape, tuple) and not shape else value
    except Exception:  # noqa: BLE001 - refused as what it is
        return value


class CheckedNumbers:
    """Reads checked numbers out of a mapping of settings.

    `origin` says of a name where it comes from, for a message, if it is not the caller.
    """

    def __init__(
        self, fields: Mapping[str, Any], origin: Callable[[str], str] = lambda name: ""
    ) -> None:
        self.fields = fields
        self._origin = origin

    def integer(
        self, name: str, default: int, at_least: int | None = None, at_most: int | None = None
    ) -> int:
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(name, "a whole number", value)
        if at_least is not None and value < at_least:
            raise self._refused(name, f"at least {at_least}", value)
        if at_most is not None and value > at_most:
            raise self._refused(name, f"at most {at_most}", value)
        return int(value)

    def real(
        self,
        name: str,
        default: float,
        *,
        at_least: float | None = None,
        above: float | None = None,
        at_most: float | None = None,
        below: float | None = None,
    ) -> float:
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(name, "a number", value)
        if not abs(value) <= LARGEST:  # also NaN
            raise self._refused(name, "a finite number of ordinary size", value)
        for bound, ok, text in (
            (at_least, at_least is None or value >= at_least, "at least"),
            (above, above is None or value > above, "more than"),
            (at_most, at_most is None or value <= at_most, "at most"),
            (below, below is None or value < below, "less than"),
        ):
            if not ok:
                raise self._refused(name, f"{text} {bound:g}", value)
        return float(value)

    def _refused(self, name: str, wanted: str, value: Any) -> SettingsError:
        minus_one = isinstance(value, int) and value == -1
        instead = f": {_MINUS_ONE[name]}" if minus_one and name in _MINUS_ONE else ""
        return SettingsError(
            f"{name} must be {wanted}, not {quoted(value)}{self._origin(name)}{instead}"
        )
