"""Checks of quantizers: layers against whole weights, bytes, files, and what stands on top."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.testing.checks import Check
from jackfield.testing.quantizer import (
    adapters,
    files,
    layers,
    memory,
    parts,
    quality,
    refusals,
    running,
)
from jackfield.testing.quantizer.loads import Loads
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """All of them; models are read once each."""
    loads = Loads(subject)
    if not loads.asks_for_a_config():
        yield from layers.checks(loads)
    for room in (memory, parts, files, running, adapters, quality, refusals):
        yield from room.checks(loads)
