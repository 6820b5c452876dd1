"""Did a row run what it asked for? What the engine's own report counted says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jackfield.errors import shown
from jackfield.spelling import parse

Report = Mapping[str, Any]


def reasons_against(asked: Mapping[str, str], report: Report) -> list[str]:
    """Why this report is not that of the backends that were `asked` for, by kind; empty: it is.

    `report` is `Report.to_dict()` of what was measured.
    """
    return [
        reason
        for kind, selection in asked.items()
        if kind != "kernel"  # of which a report has no count
        for reason in _of(kind, parse(selection).name, report)
    ]


def _of(kind: str, name: str, report: Report) -> Iterator[str]:
    seen = report.get(kind)
    if seen is None:
        yield f"nothing was observed of a {kind}, and {name} was asked for"
        return
    if seen["name"] != name:
        yield f"{kind} {shown(seen['name'])} ran, and {name} was asked for"
    elif not seen["calls"]:
        yield f"{kind} {name} was never called"
    elif kind == "attention":
        yield from _layers(name, seen)


def _layers(name: str, seen: Report) -> Iterator[str]:
    """A layer that was called less often than others was computed by something else now and then.

    Of layers that share a window or a state the engine's counts agree, so all must.
    """
    for phase in ("prefill", "decode"):
        counts = seen.get(phase) or {}
        if counts and (least := min(counts.values())) < max(counts.values()):
            layer = next(layer for layer, count in counts.items() if count == least)
            yield (
                f"attention {name} was called {least} times in layer {layer} ({phase}), and "
                f"{max(counts.values())} times in others"
            )
