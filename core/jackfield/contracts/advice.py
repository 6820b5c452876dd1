"""Backends that are asked about only to say what else might do: in an error, or in an estimate.

What takes long to find out (a kernel that has to be compiled) is not found out for that: a check
that is asked while `advising()` answers from what is quick to see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ADVISING: ContextVar[bool] = ContextVar("advising", default=False)


def advising() -> bool:
    """Whether nothing is chosen by the answer to a check of a backend that is asked now."""
    return _ADVISING.get()


@contextmanager
def for_advice() -> Iterator[None]:
    """While it is open, `advising()`, in this thread."""
    token = _ADVISING.set(True)
    try:
        yield
    finally:
        _ADVISING.reset(token)
