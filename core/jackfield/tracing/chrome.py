"""A trace in the Trace Event Format, which Perfetto and Chrome's own viewer open.

Events of one track must lie within one another or apart. Viewers read times as floating-point
numbers of microseconds, and what they make of the end of an event (its begin and its length, each
rounded) may then lie behind the end of the one around it, which they drop. So all times are
multiples of an eighth of a microsecond, which such numbers hold exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jackfield.tracing.accounts import ATTENTION, STEP, WRITES, Accounts, Record
from jackfield.tracing.lives import Life
from jackfield.tracing.recorder import Fed, Span
from jackfield.tracing.table import notes

ENGINE, REQUESTS, THREADS = 1, 2, 3  # "processes" of the file: groups of tracks
HOST, DEVICE = 1, 2  # tracks of the engine
_GRAIN = 125  # ns


def events(record: Record, accounts: Accounts) -> dict[str, Any]:
    """The whole file, for `json.dump`."""
    zero = min([record.begin, *(life.changes[0][1] for life in record.requests)])
    found = [
        *_named(record),
        *(_on_host(span, zero) for span in record.spans),
        *(_on_device(span, zero) for span in record.spans if span.device is not None),
        *(event for life in record.requests for event in _life(life, record, zero)),
        *_threads(record, zero),
    ]
    return {
        "traceEvents": found,
        "displayTimeUnit": "ms",
        "otherData": {"model": record.model, "notes": list(notes(record, accounts))},
    }


def _event(
    name: str, begin: int, end: int, where: tuple[int, int], args: dict[str, Any], kind: str
) -> dict[str, Any]:
    """One event, of times in ns since the beginning of the file."""
    first, last = (max(0, ns) // _GRAIN for ns in (begin, end))
    return {
        "name": name, "cat": kind, "ph": "X", "ts": first / 8, "dur": (last - first) / 8,
        "pid": where[0], "tid": where[1], "args": args,
    }  # fmt: skip


def _on_host(span: Span, zero: int) -> dict[str, Any]:
    begin, end, where = span.begin - zero, span.end - zero, (ENGINE, HOST)
    return _event(_name(span), begin, end, where, _told(span), span.work.kind)


def _on_device(span: Span, zero: int) -> dict[str, Any]:
    begin, end = (ns - zero for ns in span.device)
    return _event(_name(span), begin, end, (ENGINE, DEVICE), _told(span), span.work.kind)


def _name(span: Span) -> str:
    if span.work.kind in (WRITES, ATTENTION):
        return f"{span.work.name}, layer {span.detail}"
    if span.work.kind == STEP and span.detail is not None:
        return "decode step" if span.detail.decode else "step with a prompt"
    return span.work.name


def _told(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if span.work.backend is not None:
        found["backend"] = span.work.backend
    if isinstance(span.detail, Fed):
        found["tokens"] = span.detail.tokens
        found["requests"] = [number for number, _ in span.detail.sequences]
    elif span.detail is not None:
        found["layer" if span.work.kind in (WRITES, ATTENTION) else "request"] = span.detail
    return found


def _life(life: Life, record: Record, zero: int) -> Iterator[dict[str, Any]]:
    end = record.end if life.end is None else life.end
    told = {
        "prompt_tokens": life.prompt_tokens, "new_tokens": life.new_tokens,
        "found_tokens": life.found_tokens, "preemptions": life.preemptions,
        "finish_reason": life.outcome,
        "time_to_first_token": life.first_token and (life.first_token - life.came) / 1e9,
    }  # fmt: skip
    where, begin = (REQUESTS, life.id + 1), life.changes[0][1]
    yield _event(f"request {life.id}", begin - zero, end - zero, where, told, "request")
    for phase in life.phases(record.end):
        yield _event(phase.name, phase.begin - zero, phase.end - zero, where, {}, "request")


def _threads(record: Record, zero: int) -> Iterator[dict[str, Any]]:
    """What other threads did, each on a track."""
    tracks: dict[tuple[int, str], int] = {}
    for one in record.beside:
        track = tracks.setdefault(one.thread, len(tracks) + 1)
        begin, end, where = one.begin - zero, one.end - zero, (THREADS, track)
        yield _event(one.work.name, begin, end, where, {}, one.work.kind)
    yield from (_called(THREADS, track, name) for (_, name), track in tracks.items())


def _named(record: Record) -> Iterable[dict[str, Any]]:
    """What the tracks are called."""
    names = {ENGINE: f"engine: {record.model}", REQUESTS: "requests", THREADS: "other threads"}
    for group, name in names.items():
        yield {"name": "process_name", "ph": "M", "pid": group, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": group, "args": {"sort_index": group}}
    yield _called(ENGINE, HOST, "loop (host)")
    if record.device is not None:
        yield _called(ENGINE, DEVICE, f"device {record.device}")
    for life in record.requests:
        yield _called(REQUESTS, life.id + 1, f"request {life.id}")


def _called(group: int, track: int, name: str) -> dict[str, Any]:
    told = {"name": name}
    return {"name": "thread_name", "ph": "M", "pid": group, "tid": track, "args": told}
