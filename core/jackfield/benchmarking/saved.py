"""Runs in files, and two runs beside one another."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.benchmarking.contenders import OURS
from jackfield.benchmarking.results import Benchmark, Row
from jackfield.benchmarking.verdicts import Change, Verdict, apart
from jackfield.errors import UsageError, quoted, shown
from jackfield.paths import why_no_file

FORMAT = "jackfield benchmark 1"

#: Why a folder takes no other file, or gives none of its own away: a file may be mounted there.
_OF_THE_FOLDER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


@dataclass(frozen=True)
class Compared:
    """A row of two runs: how many times as long it takes as before, or why that cannot be said.

    `failed` says whether it got worse for certain: slower, or no result any more.
    """

    label: str
    change: Change | None
    why: str | None = None
    failed: bool = False

    def to_dict(self) -> dict[str, Any]:
        change = None if self.change is None else self.change.to_dict()
        return {"label": self.label, "change": change, "why": self.why, "failed": self.failed}


@dataclass(frozen=True)
class Comparison:
    """Two runs. `yardstick` is the row in whose times others were counted, in each round; None:
    there is none, and times are compared as they are. `notes` say what differs around them.
    """

    rows: tuple[Compared, ...]
    yardstick: str | None
    notes: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [row.to_dict() for row in self.rows],
            "yardstick": self.yardstick,
            "notes": list(self.notes),
            "failed": self.failed,
        }


def check_file(path: Path, flag: str) -> None:
    """Raise UsageError where nothing can be written to `path`, before anything is measured."""
    if (why := why_no_file(path)) is not None:
        raise UsageError(f"{flag} {quoted(str(path))} cannot be written: {why}")


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Raise UsageError where two flags name one file."""
    seen: dict[str, str] = {}
    for flag, path in files.items():
        if path is not None and (other := seen.setdefault(os.path.realpath(path), flag)) != flag:
            raise UsageError(f"{other} and {flag} name one file, {shown(path)}; name two")


def save(found: Benchmark, path: Path) -> None:
    """Write a run with every round, as JSON."""
    write(path, json.dumps({"format": FORMAT, **found.to_dict()}, indent=1, default=str) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all where its folder takes another one beside it.

    Raises UsageError where that fails.
    """
    whole = Path(os.path.realpath(path))
    try:
        special = whole.exists() and not whole.is_file()  # a pipe, or a terminal
        locked = whole.exists() and not os.access(whole, os.W_OK)
        if special or locked or not _replaced(whole, text):
            whole.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {shown(path)}: {error.strerror}") from None


def _replaced(path: Path, text: str) -> bool:
    """Write a file beside it, and put that in its place; whether the folder lets do so.

    What was there stays until all is written, also where the disk is full.
    """
    try:
        _replace(path, text)
    except OSError as error:
        if error.errno not in _OF_THE_FOLDER:
            raise
        return False
    return True


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".jackfield-{os.getpid()}")
    try:
        with fresh.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, fresh)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def read(path: Path) -> Benchmark:
    """A run that was saved. Raises UsageError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {shown(path)}: {error.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    told = found.get("format") if isinstance(found, dict) else None
    if told != FORMAT:
        raise UsageError(
            f"{shown(path)} is no run that `jackfield bench --save FILE` wrote; save one anew"
        )
    try:
        return _benchmark(found)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{shown(path)} was changed after it was saved ({type(error).__name__}: "
            f"{shown(error)}); save one anew"
        ) from None


def _benchmark(found: Mapping[str, Any]) -> Benchmark:
    rows = tuple(map(Row.from_dict, found["rows"]))
    own = {name: found[name] for name in Benchmark.__dataclass_fields__ if name != "rows"}
    made = Benchmark(rows, **own)
    if len({len(row.times) for row in rows if row.valid and row.times}) > 1:
        raise ValueError("rows have different numbers of rounds")
    if not all(one > 0 for row in rows for one in row.times):  # TypeError where it is a text
        raise ValueError("a round has no time")
    return made


def check_workload(before: Benchmark, workload: Mapping[str, Any]) -> None:
    """Raise UsageError where a run measured another workload than this one."""
    if before.workload["digest"] != workload["digest"]:
        raise UsageError(
            f"the saved run measured another workload ({_told(before.workload)}, now "
            f"{_told(workload)}); measure it with the flags of: "
            f"{shown(before.surroundings.get('command', '?'), 400)}"
        )


def _told(work: Mapping[str, Any]) -> str:
    return (
        f"{work['name']} with {work['prompt_tokens']} and {work['new_tokens']} tokens, seed "
        f"{work['seed']}"
    )


def compare(before: Benchmark, after: Benchmark) -> Comparison:
    """The rows of `after` beside those of `before` that have their labels, or their selections: a
    label says what is a row's own among those of its run.

    A machine is not as fast today as it was yesterday. So where both runs have the same other
    program as a row, every row is counted in its time, round by round. Raises UsageError for runs
    of different workloads.
    """
    check_workload(before, after.workload)
    yardstick = _yardstick(before, after)
    partners = _partners(before, after)
    if not partners:
        was, now = (", ".join(row.label for row in run.rows) for run in (before, after))
        raise UsageError(
            f"the runs have no row in common (before: {shown(was)}; after: {shown(now)}); measure "
            "the same selections in both"
        )
    rows = [
        _compared(partners.get(row.label), row, yardstick, before, after)
        for row in after.rows
        if row.label != yardstick
    ]
    found = {row.label for row in partners.values()}
    gone = [row.label for row in before.rows if row.label not in found]
    rows += [Compared(label, None, "it is not in this run") for label in gone]
    return Comparison(tuple(rows), yardstick, tuple(_notes(before, after)))


def _partners(before: Benchmark, after: Benchmark) -> dict[str, Row]:
    """By label of a row of `after`, the row of `before` that is the same."""
    both = {row.label for row in before.rows} & {row.label for row in after.rows}
    found = {row.label: row for row in before.rows if row.label in both}
    was, now = ([row for row in run.rows if row.label not in both] for run in (before, after))
    for row in now:
        old, new = ([one for one in some if _is_like(one, row)] for some in (was, now))
        if len(old) == len(new) == 1:
            found[row.label] = old[0]
    return found


def _is_like(one: Row, other: Row) -> bool:
    return (one.program, one.arguments) == (other.program, other.arguments)


def _yardstick(before: Benchmark, after: Benchmark) -> str | None:
    def rivals(run: Benchmark) -> list[str]:
        return [r.label for r in run.rows if r.program != OURS and r.valid and r.measured]

    both = [label for label in rivals(after) if label in rivals(before)]
    return both[0] if both else None


def _compared(
    old: Row | None, new: Row, yardstick: str | None, before: Benchmark, after: Benchmark
) -> Compared:
    if old is None:
        return Compared(new.label, None, "it is not in the saved run")
    if not new.valid:
        why = f"it is invalid: {'; '.join(new.reasons)}"
        return Compared(new.label, None, why, failed=old.valid)
    if not old.valid:
        return Compared(new.label, None, "it was invalid in the saved run")
    times = [_in_units(row, run, yardstick) for row, run in ((old, before), (new, after))]
    change = apart(*times, margin=after.margin, confidence=after.confidence)
    return Compared(new.label, change, failed=change.verdict is Verdict.SLOWER)


def _in_units(row: Row, run: Benchmark, yardstick: str | None) -> list[float]:
    if yardstick is None:
        return row.times
    return [a / b for a, b in zip(row.times, run[yardstick].times, strict=True)]


def _notes(before: Benchmark, after: Benchmark) -> list[str]:
    """What differs between two runs beside what is measured."""
    old, new = before.surroundings, after.surroundings
    pairs = [(name, old.get(name), new.get(name)) for name in ("hardware", "cores")]
    was, now = old.get("versions", {}), new.get("versions", {})
    pairs += [(name, was.get(name), now.get(name)) for name in sorted({*was, *now})]
    return [f"{name}: {one} before, {other} now" for name, one, other in pairs if one != other]
