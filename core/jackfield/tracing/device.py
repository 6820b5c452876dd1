"""Times of a CUDA device: events in its stream, recorded in the steps and read when all is over."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import torch

from jackfield.tracing.recorder import Span


class DeviceClock:
    """Stamps in the stream of `device` that is the current one. No step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._end: Any = None
        self._ended = 0

    def stamp(self) -> Any:
        """Now, in the order of the stream; None while a graph is recorded, which takes none in."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def end(self) -> None:
        """The trace ends: wait for the device, so that its clock can be read by the host's."""
        self._end = self.stamp()
        torch.cuda.synchronize(self.device)
        self._ended = time.perf_counter_ns()

    def placed(self, blocks: Seq[Seq[Span]]) -> list[list[Span]]:
        """The spans of all steps, with the device's times in place of stamps.

        Events tell how far apart they are, the less exactly the further: so each step is placed by
        the one behind it, the last one by the end of the trace.
        """
        placed: list[list[Span]] = []
        later, at = self._end, self._ended
        for block in reversed(blocks):
            stamped = [span for span in block if _whole(span)]
            if stamped:
                first = min(stamped, key=lambda span: span.begin).device[0]
                at -= _apart(first, later)
                later = first
            placed.append([_at(span, later, at) for span in block])
        return placed[::-1]


def device_of(model: Any) -> tuple[DeviceClock | None, list[str]]:
    """The clock of the one CUDA device that a model is on, and what is to be said without."""
    devices = {parameter.device for parameter in model.parameters()}
    types = {device.type for device in devices} - {"cpu", "meta"}
    if not types:
        return None, []
    if types == {"cuda"} and len(devices) == 1:
        return DeviceClock(devices.pop()), [
            "where the host waits for the device, as in sampling, its times are the device's"
        ]
    where = ", ".join(sorted(map(str, devices)))
    return None, [
        f"the model is on {where}: times are the host's, which hands work over and does not wait"
    ]


def _whole(span: Span) -> bool:
    return span.device is not None and None not in span.device


def _apart(first: Any, last: Any) -> int:
    """ns between two events; they are told in ms."""
    return max(0, round(float(first.elapsed_time(last)) * 1e6))


def _at(span: Span, first: Any, at: int) -> Span:
    if not _whole(span):
        return span._replace(device=None)
    begin, end = (at + _apart(first, stamp) for stamp in span.device)
    return span._replace(device=(begin, max(begin, end)))
