"""Libraries that log, at import and at first use, what nobody asked for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

#: What transformers brings in by itself where torchao is installed: compiled files for other
#: devices that do not load, and a deprecation between torch and torchao.
TORCHAO = ("torchao", "torch.utils._pytree")


@contextlib.contextmanager
def quieted(*names: str) -> Iterator[None]:
    """Let these loggers, and those below them, pass errors only. Levels are given back."""
    loggers = [logging.getLogger(name) for name in names]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(max(each.level, logging.ERROR))
    try:
        yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
