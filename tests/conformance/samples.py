"""Which cases of a sweep every test run tries; the others are for `-m long`.

By hash, so that the sample is neither the beginning of a list nor what somebody found convenient.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def drawn(cases: Iterable[str], one_in: int) -> list[str]:
    """About one in `one_in` of `cases`, and one of them at least."""
    order = sorted(cases, key=lambda case: zlib.crc32(case.encode()))
    return order[: -(-len(order) // one_in)]


def share(part: float) -> int:
    """`max_examples` of a test whose examples are slow: `part` of what the profile has."""
    return int(settings.default.max_examples * part)  # type: ignore[union-attr]


def sampled(cases: Iterable[str], one_in: int) -> list[Any]:
    """All `cases` as parameters, those that are not drawn as `long` ones."""
    cases = list(cases)
    mine = drawn(cases, one_in)
    return [pytest.param(c, marks=() if c in mine else pytest.mark.long) for c in cases]
