"""A job answers each line as the server does, and tells each that fails."""

from __future__ import annotations

import functools
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import extras
import pytest
from jobs import CHAT, TEXT, asks, done, errors_of, job, read, sorting, write

import jackfield
from jackfield.batch import answering, running
from jackfield.batch.lines import Line
from jackfield.batch.sources import open_source
from jackfield.errors import ExecutionError, UsageError
from jackfield.serving.answering import ENDPOINTS, Answering

RESPONSES = "/v1/responses"
SAY = [{"role": "user", "content": "Sort these numbers: 41 7"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "odd"}}}
TOOL = {"type": "function", "function": {"name": "now"}}
BODIES = [
    (CHAT, {"messages": SAY}),
    (CHAT, {"messages": SAY, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    (CHAT, {"messages": SAY, "n": 2, "temperature": 1, "seed": 5, "max_tokens": 5}),
    (TEXT, {"prompt": ["Once", "One day"], "max_tokens": 3, "echo": True}),
    (TEXT, {"prompt": [40, 41], "max_tokens": 3, "stop": ["a"]}),
    (RESPONSES, {"input": "Hello", "max_output_tokens": 4}),
    (CHAT, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": SAY, "n": 2}),
    (CHAT, {"messages": SAY, "n": 100, "temperature": 1}),
    (CHAT, {"messages": SAY, "max_tokens": 100_000}),
    (CHAT, {"messages": SAY, "frequenzy_penalty": 1}),
    (CHAT, {"messages": SAY, "ignore_eos": True}),
    (CHAT, {"messages": SAY, "response_format": SCHEMA}),
    (CHAT, {"messages": SAY, "tools": [TOOL]}),
    (CHAT, {"messages": SAY, "model": "gpt-4o"}),
    (TEXT, {"prompt": "", "suffix": "x"}),
    (TEXT, {"prompt": ["a", ""]}),
    (RESPONSES, {"input": [], "max_output_tokens": 4}),
    (RESPONSES, {"input": "a", "store": True}),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
    (RESPONSES, {"input": "a", "max_output_tokens": 4, "background": True}),
]


def test_the_urls_are_the_endpoints() -> None:
    assert set(Line.model_json_schema()["properties"]["url"]["enum"]) == set(ENDPOINTS)


#: What differs between two that answer alike.
APART = {"id", "created", "created_at", "completed_at"}


def same(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: same(v) for k, v in value.items() if k not in APART}
    return [same(v) for v in value] if isinstance(value, list) else value


def test_each_line_is_answered_as_the_server_answers_it(tmp_path: Path) -> None:
    extras.needs("httpx", "uvicorn")
    import httpx
    from served import serving

    alone = {"deterministic": True}  # log-probabilities, too, and nothing is counted as cached
    with (
        serving(stored_responses=0, models={"demo": {"model": "demo", **alone}}) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        answers = [
            client.post(url, json={"model": "demo", "temperature": 0, **body})
            for url, body in BODIES
        ]
    assert {answer.status_code for answer in answers} == {200, 400, 404}
    lines = [asks(f"r{at}", url, **body) for at, (url, body) in enumerate(BODIES)]
    for line, (_, body) in zip(lines, BODIES, strict=True):
        line["body"] = {"model": "demo", "temperature": 0, **body}
    output = tmp_path / "out.jsonl"
    done(write(tmp_path / "in.jsonl", lines), output, **alone)
    found = {
        line["custom_id"]: line["response"] for line in (*read(output), *errors_of(output).values())
    }
    assert len(found) == len(BODIES)
    for at, answer in enumerate(answers):
        assert found[f"r{at}"]["status_code"] == answer.status_code, BODIES[at]
        assert same(found[f"r{at}"]["body"]) == same(answer.json())


GOOD = asks("good")
DEEP = '{"custom_id": "deep", "body": ' + "[" * 100 + "]" * 100 + "}"
#: line -> custom_id, and what is said of it
BAD: list[tuple[Any, str | None, str]] = [
    ("no JSON", None, "the line is not JSON: Expecting value"),
    ('{"custom_id": "torn", "method"', None, "the line is not JSON"),
    (b'{"custom_id": "\xff"}', None, "the line is not UTF-8"),
    ('{"custom_id": "a", "custom_id": "b"}', None, "the line has 'custom_id' twice"),
    ('{"custom_id": "\\ud800"}', None, "custom_id has half of a character"),
    ('{"custom_id": "a", "n": NaN}', None, "the line has NaN, which is no number"),
    (DEEP, None, "the line is nested 101 deep; at most 64 are read"),
    (json.dumps(asks("long", prompt="x" * 5_000_000)), None, "the line has more than 4194304"),
    ("[1, 2]", None, "the line is no JSON object"),
    ("null", None, "the line is no JSON object"),
    ({**GOOD, "custom_id": 7}, None, "the line has no custom_id"),
    ({**GOOD, "custom_id": ""}, None, "the line has no custom_id"),
    ({"method": "POST", "url": TEXT, "body": {}}, None, "the line has no custom_id"),
    (GOOD, "good", "custom_id: an earlier line has 'good'"),
    ({**GOOD, "custom_id": "i" * 2000}, "i" * 2000, "custom_id: String should have at most 1024"),
    ({**GOOD, "custom_id": "b1", "url": "/v1/embeddings"}, "b1", "url: Input should be '/v1/chat"),
    ({**GOOD, "custom_id": "b2", "method": "GET"}, "b2", "method: Input should be 'POST'"),
    ({**GOOD, "custom_id": "b3", "body": "x"}, "b3", "the body: Input should be a valid dict"),
    ({**GOOD, "custom_id": "b4", "body": None}, "b4", "there is no body; send one"),
    ({**GOOD, "custom_id": "b5", "priority": 1}, "b5", "nothing here reads the field 'priority'"),
]  # fmt: skip
REFUSED: list[tuple[Any, str | None, str]] = [
    (asks("r1", stream=True), "r1", "stream: a batch has no streams"),
    (asks("r2", temperature=9), "r2", "temperature: Input should be less than or equal to 2"),
    (asks("r3", model="gpt-4o"), "r3", "there is no model 'gpt-4o' here; there are demo"),
    (asks("r4", max_tokens=100_000), "r4", "max_tokens"),
    (asks("r5", logit_bias={"0": -100}, choices=["a"], regex="b"), "r5", "regex"),
]


def test_each_bad_line_is_told_by_its_number_and_the_rest_is_answered(tmp_path: Path) -> None:
    lines: list[Any] = ["\ufeff" + json.dumps(GOOD)]
    numbers: list[int] = []
    for line, *_ in (*BAD, *REFUSED):
        lines += ["  ", line]
        numbers.append(len(lines))
    last = json.dumps(asks("last")).encode() + b"\r"
    source, output = write(tmp_path / "in.jsonl", [*lines, last]), tmp_path / "out.jsonl"
    outcome = done(source, output)
    assert (outcome.answered, outcome.failed) == (2, len(numbers))
    assert [line["custom_id"] for line in read(output)] == ["good", "last"]
    found = errors_of(output)
    assert list(found) == numbers
    for number, (_, custom_id, said) in zip(numbers, (*BAD, *REFUSED), strict=True):
        one = found[number]
        assert one["error"]["message"].startswith(f"line {number}: "), one
        assert said in one["error"]["message"], one
        assert one["custom_id"] == custom_id
        assert one["error"].keys() == {"code", "message", "param", "line"}
    asked = [found[number]["response"] is not None for number in numbers]
    assert asked == [False] * len(BAD) + [True] * len(REFUSED)

    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = done(source, output)
    assert (again.before, again.total) == (2 + len(numbers),) * 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_lines_stand_in_the_order_of_the_input(tmp_path: Path) -> None:
    lines = [asks(f"r{at}", max_tokens=40 if at % 5 == 0 else 1 + at % 3) for at in range(30)]
    lines.insert(7, asks("bad", temperature=7))
    lines.insert(3, {"custom_id": "early"})
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    seen: list[tuple[int, int]] = []
    outcome = running.run(job(source, output), lambda *counts: seen.append(counts))
    assert [line["custom_id"] for line in read(output)] == [f"r{at}" for at in range(30)]
    assert list(errors_of(output)) == [4, 9]
    assert seen == [(at, 32) for at in range(33)]
    assert (outcome.total, outcome.before, outcome.failed) == (32, 0, 2)
    assert outcome.report["attention"].calls > 0


def test_lines_are_read_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_ahead, ended = [0], 0

    class Watched:
        def __init__(self, *given: Any) -> None:
            self._source = open_source(*given)
            self.total, self.digest = self._source.total, self._source.digest

        def __iter__(self) -> Iterator[tuple[int, Any]]:
            for number, value in self._source:
                read_ahead.append(number - ended)
                yield number, value

    def moved(count: int, of: int) -> None:
        nonlocal ended
        ended = count

    monkeypatch.setattr(running, "open_source", Watched)
    source = write(tmp_path / "in.jsonl", sorting(60))
    running.run(job(source, tmp_path / "out.jsonl", max_batch_size=2), moved)
    assert ended == 60
    assert max(read_ahead) == 4 * 2 + 1  # the last of them waits for room


CHANGES: dict[str, Callable[[Path], Any]] = {
    "grows": lambda path: path.write_bytes(path.read_bytes() + b"{}\n"),
    "is another of the same size": lambda path: path.write_bytes(
        path.read_bytes().replace(b"Once", b"Only")
    ),
    "is cut off": lambda path: os.truncate(path, 4000),
    "is gone into": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.one_in(4)
def test_an_input_that_is_changed_meanwhile_ends_the_job(tmp_path: Path, change: str) -> None:
    """Before a line is answered that another input has."""
    source = write(tmp_path / "in.jsonl", [asks(f"r{at}", max_tokens=1) for at in range(60)])
    text, output, asked = source.read_bytes(), tmp_path / "out.jsonl", []

    def moved(count: int, of: int) -> None:
        asked.append(count)
        if count == 3:
            CHANGES[change](source)

    with pytest.raises(ExecutionError, match=r"in.jsonl was changed while the job ran; what is"):
        running.run(job(source, output, max_batch_size=1), moved)
    assert len(asked) < 20
    source.write_bytes(text)
    assert done(source, output, max_batch_size=32).answered == 60
    assert [line["custom_id"] for line in read(output)] == [f"r{at}" for at in range(60)]
    alone = tmp_path / "alone.jsonl"
    done(source, alone)
    assert [a["response"]["body"]["choices"] for a in read(output)] == [
        b["response"]["body"]["choices"] for b in read(alone)
    ]


def test_an_input_that_is_only_touched_is_the_same(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [asks(f"r{at}", max_tokens=1) for at in range(9)])
    outcome = running.run(
        job(source, tmp_path / "out.jsonl", max_batch_size=1),
        lambda count, of: os.utime(source, ns=(count, count)),
    )
    assert outcome.answered == 9


def test_an_empty_input_has_an_empty_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert done(write(tmp_path / "in.jsonl", []), output).total == 0
    assert output.read_bytes() == b""


Load = Callable[..., jackfield.Engine]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Load], None]:
    """Has jobs load their engine by this."""

    def by(load: Load) -> None:
        monkeypatch.setattr(answering, "Answering", functools.partial(Answering, load=load))

    return by


def test_what_an_engine_fails_at_is_asked_again(tmp_path: Path, loads: Any) -> None:
    steps = 0

    def fail(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("the kernel is broken")

    def load(*given: Any, **arguments: Any) -> jackfield.Engine:
        engine = jackfield.load(*given, **arguments)
        engine.model.register_forward_pre_hook(fail)
        return engine

    loads(load)
    source, output = write(tmp_path / "in.jsonl", sorting(12)), tmp_path / "out.jsonl"
    outcome = done(source, output, max_batch_size=4)
    assert outcome.failed > 0
    assert outcome.answered + outcome.failed == 12
    for one in errors_of(output).values():
        assert one["response"]["status_code"] == 500
        assert "the kernel is broken" in one["error"]["message"]
    again = done(source, output, max_batch_size=4)
    assert (again.before, again.answered, again.failed) == (outcome.answered, 12, 0)
    assert errors_of(output) == {}
    assert [line["custom_id"] for line in read(output)] == [f"line {at}" for at in range(12)]


def test_without_an_engine_the_job_ends_and_goes_on_later(tmp_path: Path, loads: Any) -> None:
    engines: list[jackfield.Engine] = []

    def load(*given: Any, **arguments: Any) -> jackfield.Engine:
        if engines:
            raise ExecutionError("the device is gone")
        engines.append(jackfield.load(*given, **arguments))
        return engines[0]

    def moved(count: int, of: int) -> None:
        if count == 5:
            engines[0].close()

    loads(load)
    source, output = write(tmp_path / "in.jsonl", sorting(12)), tmp_path / "out.jsonl"
    with pytest.raises(ExecutionError, match=r"line \d+: demo: .*; what is answered stays there"):
        running.run(job(source, output, max_batch_size=2), moved)
    assert len(read(output)) >= 5
    assert errors_of(output) == {}
    loads(jackfield.load)
    outcome = done(source, output)
    assert (outcome.before, outcome.answered) == (outcome.before, 12)
    assert outcome.before >= 5


def test_a_step_that_hangs_ends_the_job_with_its_cause(tmp_path: Path, loads: Any) -> None:
    held, steps = threading.Event(), 0

    def hang(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > 12:
            held.wait(60)

    def load(*given: Any, **arguments: Any) -> jackfield.Engine:
        engine = jackfield.load(*given, **arguments)
        engine.model.register_forward_pre_hook(hang)
        return engine

    loads(load)
    source, output = write(tmp_path / "in.jsonl", sorting(12)), tmp_path / "out.jsonl"
    try:
        with pytest.raises(ExecutionError, match=r"line \d+: demo: a step hangs in the model's"):
            done(source, output, max_batch_size=2, stall_after=0.3)
    finally:
        held.set()
    assert errors_of(output) == {}
    before = len(read(output))
    assert 0 < before < 12
    loads(jackfield.load)
    assert done(source, output, stall_after=0.3).before == before


def test_a_full_disk_ends_the_job_where_it_is(tmp_path: Path, bounded: Any) -> None:
    source, output = write(tmp_path / "in.jsonl", sorting(20)), tmp_path / "out.jsonl"
    bounded(5000)
    with pytest.raises(ExecutionError, match=r"out.jsonl cannot be written: File too large; what"):
        done(source, output)
    bounded(resource.RLIM_INFINITY)
    before = read(output)
    assert 5 < len(before) < 20
    assert output.read_bytes().endswith(b"}\n")
    outcome = done(source, output)
    assert (outcome.before, outcome.answered) == (len(before), 20)
    assert [line["custom_id"] for line in read(output)] == [f"line {at}" for at in range(20)]
    assert all(line in read(output) for line in before)


def test_a_job_that_cannot_begin_is_told(tmp_path: Path, bounded: Any) -> None:
    source, output = write(tmp_path / "in.jsonl", sorting(1)), tmp_path / "out.jsonl"
    bounded(100)
    with pytest.raises(ExecutionError, match=r"out.jsonl.job cannot be written: File too large"):
        done(source, output)
    bounded(resource.RLIM_INFINITY)
    assert list(tmp_path.iterdir()) == [source]
    assert done(source, output).answered == 1


def test_a_server_s_variables_are_none_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACKFIELD_HOST", "0.0.0.0")
    monkeypatch.setenv("JACKFIELD_MAX_COMPLETION_TOKENS", "1")
    source, output = write(tmp_path / "in.jsonl", [asks("a", CHAT, messages=SAY)]), tmp_path / "o"
    done(source, output, {"max_completion_tokens": 3})
    (line,) = read(output)
    assert line["response"]["body"]["usage"]["completion_tokens"] == 3
    with pytest.raises(UsageError, match="reasoning: Input should be 'auto', 'on' or 'off'"):
        done(source, tmp_path / "p", {"reasoning": "maybe"})
    assert not (tmp_path / "p.job").exists()
