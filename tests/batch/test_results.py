"""A file of results is whole after whatever ended the process, and in order at the end."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from jackfield.batch.results import Results
from jackfield.errors import ExecutionError, UsageError


def key(record: Any) -> int | None:
    return None if record.get("again") else int(record["n"])


def of(path: Path) -> Results[int]:
    return Results(path, key)


def append(results: Results[int], *numbers: int) -> None:
    for number in numbers:
        results.append(number, record(number))


def record(number: int) -> dict[str, Any]:
    return {"n": number, "text": "é✓\u2028\n" * (number % 3)}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.jsonl"
    results = of(path)
    append(results, *range(5))
    results.close()
    return path


def test_wherever_it_is_cut_it_goes_on_to_the_same_file(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    for size in range(len(data) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(data[:size])
        results = of(path)
        assert len(results) == data[:size].count(b"\n")
        append(results, *(number for number in range(5) if number not in results))
        results.close()
        assert path.read_bytes() == data


def test_zeros_that_a_lost_machine_leaves_are_cut_off(whole: Path) -> None:
    data = whole.read_bytes()
    with whole.open("ab") as file:
        file.write(bytes(5000))
    assert len(of(whole)) == 5
    assert whole.read_bytes() == data


def test_lines_are_put_in_order(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    results = of(path)
    append(results, 3, 0, 4, 2, 1)
    path.with_name(f"{path.name}.writing").write_text("of a process that was killed")
    results.arrange(range(5))
    results.close()
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [path, whole]
    again = of(path)
    assert list(again) == list(range(5))
    before = path.stat().st_ino
    again.arrange(range(5))
    assert path.stat().st_ino == before  # which is not written again


def test_lines_that_are_to_be_done_again_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    results = of(path)
    for number in range(4):
        results.append(number, {**record(number), "again": number % 2})
    results.arrange([3, 2, 1, 0])
    results.close()
    assert path.read_bytes().count(b"\n") == 4  # those of this time stay
    again = of(path)
    assert list(again) == [2, 0]
    again.append(1, record(1))
    again.close()
    assert [n in of(path) for n in range(4)] == [True, True, True, False]
    path.write_text('{"n": 1, "again": 1}\n')
    assert (len(of(path)), path.exists()) == (0, False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no", "line 6 of .* is not one that a batch job writes"),
        ("\0\0\0", "line 6 of .* is not one that a batch job writes"),
        ("[]", "line 6 of .* is not one that a batch job writes"),
        ('{"m": 1}', "line 6 of .* is not one that a batch job writes"),
        ('{"n": 2}', "line 6 of .* is there twice"),
    ],
)
def test_what_no_job_writes_is_refused_and_left(whole: Path, line: str, said: str) -> None:
    with whole.open("a") as file:
        file.write(f'{line}\n{{"n": 9}}\n')
    data = whole.read_bytes()
    with pytest.raises(UsageError, match=said):
        of(whole)
    assert whole.read_bytes() == data


def test_what_does_not_fit_leaves_what_is_there(whole: Path, tmp_path: Path, bounded: Any) -> None:
    data = whole.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    for size in range(len(data)):
        path = tmp_path / "full.jsonl"
        results = of(path)
        bounded(size)
        with pytest.raises(ExecutionError, match=r"cannot be written: File too large; what is an"):
            append(results, *range(5))
        bounded(resource.RLIM_INFINITY)
        results.close()
        assert path.read_bytes() == data[: max((end for end in ends if end <= size), default=0)]
        path.unlink()


def test_where_there_is_no_room_to_put_them_in_order_they_stay(
    whole: Path, tmp_path: Path, bounded: Any
) -> None:
    path = tmp_path / "full.jsonl"
    shutil.copy(whole, path)
    results = of(path)
    bounded(20)
    with pytest.raises(ExecutionError, match="cannot be written: File too large"):
        results.arrange([4, 3, 2, 1, 0])
    bounded(resource.RLIM_INFINITY)
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [path, whole]
