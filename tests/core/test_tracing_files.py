"""The files of a trace: events that Perfetto takes, a picture of bounded size, and the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced import assert_adds_up

import jackfield
from jackfield import Trace
from jackfield.errors import UsageError
from jackfield.tracing import accounts
from jackfield.tracing.accounts import Accounts, Record, outer_first
from jackfield.tracing.chrome import events
from jackfield.tracing.lives import Life
from jackfield.tracing.picture import svg
from jackfield.tracing.recorder import Beside, Fed, Span, Work
from jackfield.tracing.table import seconds, table

if TYPE_CHECKING:
    from command_line import Cli

#: A call: which kind, how long before and after what is within it, and what is within it.
CALLS = st.recursive(
    st.tuples(st.integers(0, 17), st.integers(0, 999), st.just([]), st.integers(0, 999)),
    lambda inner: st.tuples(
        st.integers(0, 17), st.integers(0, 999), st.lists(inner, max_size=3), st.integers(0, 999)
    ),
    max_leaves=20,
)


def spans_of(calls: Any, begin: int, *, device: bool) -> Iterator[Span]:
    """Spans as they end: of calls one after the other, each with those within it."""
    at = begin
    for kind, before, inner, after in calls:
        start, at = at, at + before
        for span in spans_of(inner, at, device=device):
            yield span
            at = max(at, span.end)
        at += after
        name = accounts.KINDS[kind]
        detail = Fed(((1, 1),), True) if name == accounts.STEP else None
        if name in (accounts.ATTENTION, accounts.WRITES):
            detail = kind % 3
        times = (start + 7, at + 7) if device else None
        yield Span(Work(name, name, f"{name} of somebody"), start, at, detail, times)


@given(st.lists(CALLS, max_size=6), st.booleans())
def test_whatever_was_called_adds_up_and_lies_within(calls: Any, device: bool) -> None:
    spans = outer_first(spans_of(calls, 1_000_000, device=device))
    end = max((span.end for span in spans), default=1_000_000) + 5
    lives = [Life(3, 4, 999_000, [("waiting", 999_000), ("prefill", 1_000_010)], end=1_000_020)]
    beside = [Beside(Work("entering", "read"), 1_000_000, 1_000_500, (7, "Main"))]
    record = Record(1_000_000, end, spans, beside, lives, "m", "cuda:0" if device else None)
    found = assert_adds_up(record)
    assert_nested(events(record, found))
    drawn = svg(record, found)
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert table(record, found)


def assert_nested(found: dict[str, Any]) -> None:
    """The events have the fields that viewers want, and nest on each track when they are read."""
    found = json.loads(json.dumps(found))
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named = set()
    for event in found["traceEvents"]:
        assert event["ph"] in "XM"
        assert type(event["pid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            named.add((event["pid"], event.get("tid")))
            continue
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert type(event["tid"]) is int
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        # Viewers make whole ns of each by cutting off what is behind the point.
        begin, length = int(event["ts"] * 1000.0), int(event["dur"] * 1000.0)
        tracks.setdefault((event["pid"], event["tid"]), []).append((begin, begin + length))
    assert set(tracks) <= named
    for times in tracks.values():
        stack: list[tuple[int, int]] = []
        for begin, end in sorted(times, key=lambda one: (one[0], -one[1])):
            while stack and stack[-1][1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1][1], "two events overlap, and one is dropped"
            stack.append((begin, end))


@pytest.fixture(scope="module")
def trace() -> Trace:
    with jackfield.load("demo", compile="none") as engine:
        with engine.trace() as found:
            engine.generate(["Once upon a time", "One day"], max_new_tokens=8)
        list(engine.stream("more", max_new_tokens=2))
    return found


def test_a_file_for_perfetto(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert_nested(found)
    names = {event["name"] for event in found["traceEvents"]}
    assert {"decode step", "step with a prompt", "forward", "sampling", "prefill"} <= names
    assert "attention, layer 0" in names
    tracks = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert {"loop (host)", "request 0", "request 1"} <= tracks
    step = next(e for e in found["traceEvents"] if e["name"] == "decode step")
    assert step["args"] == {"tokens": 2, "requests": [0, 1]}


def test_a_picture(trace: Trace, tmp_path: Path) -> None:
    trace.save(str(tmp_path / "trace.svg"))
    text = (tmp_path / "trace.svg").read_text()
    root = ET.fromstring(text)
    assert "@media (prefers-color-scheme: dark)" in text
    words = " ".join(part for part in root.itertext())
    for word in ("all time", "steps", "request 1", "one step", "by layer", "waiting", " ms"):
        assert word in words
    used = set(re.findall(r'class="(\w+)"', text))
    styled = set(re.findall(r"\.(\w+) \{", text))
    assert used <= styled
    left, width = 0, float(root.attrib["viewBox"].split()[2])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, wide = float(box.get("x", 0)), float(box.get("width", 0))
        assert left <= x <= x + wide <= width + 1


def test_a_picture_of_a_long_trace_is_small() -> None:
    step, attention = Work(accounts.STEP, "step"), Work(accounts.ATTENTION, "attention")
    forward = Work(accounts.FORWARD, "forward")
    spans = []
    for number in range(20_000):
        at = 1000 * number
        spans.append(Span(step, at, at + 900, Fed(((1, 1),), bool(number % 50))))
        spans.append(Span(forward, at + 100, at + 800))
        spans.append(Span(attention, at + 200, at + 700, number % 120))
    lives = [Life(n, 5, 0, [("waiting", 0), ("prefill", 10), ("decode", 20)]) for n in range(500)]
    record = Record(0, 20_000_000, spans, (), lives, "m")
    drawn = svg(record, Accounts.of(record))
    assert len(drawn) < 250_000
    assert "and 484 requests more" in drawn
    assert "… 480 more" in table(record, Accounts.of(record))


def test_a_page(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "trace.html")
    text = (tmp_path / "trace.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "<svg" in text
    assert "steps (1 with prompts)" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trace.txt", "name a file that ends in .json"),
        ("trace", "name a file that ends in .json"),
        ("nowhere/trace.json", "there is no folder"),
        ("folder.svg", "it is a folder"),
        ("a\0.svg", "null"),
    ],
)
def test_files_that_cannot_be_written(trace: Trace, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder.svg").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match=said):
        trace.save(tmp_path / name)


def test_an_empty_trace_is_a_table_and_files_too(tmp_path: Path) -> None:
    with jackfield.load("demo", compile="none") as engine, engine.trace() as trace:
        pass
    assert "0 steps" in str(trace)
    for ending in ("json", "svg", "html"):
        trace.save(tmp_path / f"trace.{ending}")
    assert ET.fromstring((tmp_path / "trace.svg").read_text()) is not None


@pytest.mark.parametrize(
    ("ns", "text"), [(1_234_567_890, "1.235 s"), (1_234_567, "1.235 ms"), (0, "0.000 ms")]
)
def test_times_as_people_read_them(ns: int, text: str) -> None:
    assert seconds(ns) == text


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = cli(
        "trace", "--prompt", "Once upon a time", "--prompt", "One day", "--max-new-tokens", "4",
        "--compile", "none", "-o", str(file), "-o", str(file.with_suffix(".svg")),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "traced: 2 requests, " in done.out
    assert "open it at https://ui.perfetto.dev" in done.err
    assert_nested(json.loads(file.read_text()))
    assert file.with_suffix(".svg").stat().st_size > 1000


def test_the_command_in_json(cli: Cli) -> None:
    done = cli("trace", "--cold", "--json", "--chat", "--max-new-tokens", "2", "--compile", "none")
    assert done.json["requests"][0]["new_tokens"] <= 2
    assert done.json["plan"]
    assert {tuple(row["path"]) for row in done.json["work"]} >= {("steps", "forward"), ("idle",)}


def test_the_command_refuses_a_file_before_it_loads(cli: Cli) -> None:
    cli("trace", "nowhere", "-o", "x.txt").assert_failed(2, "cannot write a trace to x.txt: name")
