"""Parquet files ask and answer what lines of JSON do."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import extras
import pytest
from jobs import asks, done, errors_of, job, read, sorting, write

from jackfield.batch import parquet
from jackfield.batch.running import run
from jackfield.errors import ExecutionError, UsageError

if extras.here("pyarrow"):
    import pyarrow
    import pyarrow.parquet

needed = extras.marked("pyarrow")

LINES: list[Any] = [
    *sorting(6), asks("bad", temperature=9), asks("line 0"), {**asks("get"), "method": "GET"},
]  # fmt: skip


def table(path: Path, rows: list[Any], **more: Any) -> Path:
    texts = [{**row, "body": json.dumps(row["body"]), **more} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), path)
    return path


@needed
def test_rows_are_answered_as_lines_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS", 4)  # in several pieces
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    done(write(tmp_path / "in.jsonl", LINES), one, deterministic=True)
    done(table(tmp_path / "in.parquet", LINES), other, deterministic=True)

    def said(path: Path) -> list[Any]:
        return [
            (line["custom_id"], line["response"]["body"]["choices"], line["error"])
            for line in read(path)
        ]

    assert said(one) == said(other)
    assert len(said(one)) == 6
    assert [e["error"] for e in errors_of(one).values()] == [
        e["error"] for e in errors_of(other).values()
    ]
    assert list(errors_of(other)) == [7, 8, 9]


@needed
def test_a_table_of_answers_has_what_the_lines_have(tmp_path: Path, bounded: Any) -> None:
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.parquet"
    assert done(source, output).answered == 6
    lines = read(tmp_path / "out.parquet.lines.jsonl")
    found = pyarrow.parquet.read_table(output).to_pylist()
    assert [row["custom_id"] for row in found] == [f"line {at}" for at in range(6)]
    for row, line in zip(found, lines, strict=True):
        response = line["response"]
        assert (row["id"], row["custom_id"]) == (line["id"], line["custom_id"])
        assert (row["status_code"], row["request_id"]) == (200, response["request_id"])
        assert json.loads(row["body"]) == response["body"]
    output.unlink()
    bounded(100)
    with pytest.raises(ExecutionError, match=r"out.parquet cannot be written: .*File too large"):
        done(source, output)
    bounded(resource.RLIM_INFINITY)
    assert not list(tmp_path.glob("out.parquet*ing"))
    assert not output.exists()
    # as where the process was killed while it was written
    (tmp_path / "out.parquet.writing").write_bytes(b"PAR1")
    assert done(source, output).before == 9
    assert pyarrow.parquet.read_table(output).to_pylist() == found
    assert not (tmp_path / "out.parquet.writing").exists()


@needed
def test_bad_bodies_are_told_by_their_row(tmp_path: Path) -> None:
    bad: dict[str | None, str] = {
        '{"a"': "the body is not JSON",
        None: "there is no body",
        "[]": "the body: Input should be a valid dict",
        f'{{"prompt": "{"x" * 5_000_000}"}}': "the body has more than 4194304 bytes",
    }
    rows = [
        {"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}
        for at, body in enumerate([*bad, '{"model": "demo", "prompt": "Once"}'], 1)
    ]
    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    done(source, output)
    assert [line["custom_id"] for line in read(output)] == ["r5"]
    found = errors_of(output)
    assert [(n, found[n]["custom_id"]) for n in found] == [(n, f"r{n}") for n in (1, 2, 3, 4)]
    for number, said in enumerate(bad.values(), 1):
        assert found[number]["error"]["message"].startswith(f"line {number}: {said}")


@needed
def test_a_table_that_is_damaged_ends_the_job_where_it_is(tmp_path: Path) -> None:
    source, output = table(tmp_path / "in.parquet", LINES), tmp_path / "out.jsonl"
    data = bytearray(source.read_bytes())
    data[4:200] = bytes(196)
    source.write_bytes(data)
    with pytest.raises(ExecutionError, match=r"in.parquet cannot be read beyond row 0: "):
        done(source, output)


@needed
def test_a_table_that_is_changed_meanwhile_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROWS", 2)
    source, output = table(tmp_path / "in.parquet", LINES), tmp_path / "out.jsonl"

    def moved(count: int, of: int) -> None:
        if count == 1:
            table(source, LINES[1:])

    with pytest.raises(ExecutionError, match=r"in.parquet was changed while the job ran"):
        run(job(source, output, max_batch_size=1), moved)
    table(source, LINES)
    assert done(source, output, max_batch_size=1).answered == 6


def other_type(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([asks("a")]), path)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no table": (lambda path: path.write_bytes(b"PAR1"), "is no Parquet file: "),
    "more": (lambda path: table(path, LINES, note="x"), "has the columns .*note; a batch is read"),
    "less": (
        lambda path: table(path, [{"custom_id": "a", "body": {}}]),
        "has the columns custom_id, body; a batch is read from custom_id, method, url, body",
    ),
    "a struct": (other_type, "the column body is struct<.*, and must be a text with JSON"),
}


@needed
@pytest.mark.parametrize("name", WRONG)
def test_another_table_is_refused(tmp_path: Path, name: str) -> None:
    make, said = WRONG[name]
    source = tmp_path / "in.parquet"
    make(source)
    with pytest.raises(UsageError, match=said):
        done(source, tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == [source]


def test_without_the_library_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = write(tmp_path / "in.jsonl", [asks("a")])
    same = write(tmp_path / "in.parquet", [asks("a")])
    for given, output in ((source, tmp_path / "o.parquet"), (same, tmp_path / "o.jsonl")):
        with pytest.raises(UsageError, match=r"need pyarrow; pip install jackfield\[parquet\]"):
            done(given, output)
    assert sorted(tmp_path.iterdir()) == [source, same]
