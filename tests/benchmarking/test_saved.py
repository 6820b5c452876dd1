"""Saved runs: what is read is what was written, and what is slower than it was."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from made_runs import FAST, SLOW, WORK, row, run

from jackfield.benchmarking import saved
from jackfield.benchmarking.verdicts import Verdict
from jackfield.errors import UsageError

if TYPE_CHECKING:
    from command_line import Cli


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    found = run(row("a", FAST), row("b", SLOW, reasons=("wrong tokens",)), row("c", []))
    saved.save(found, tmp_path / "run.json")
    again = saved.read(tmp_path / "run.json")
    assert again == found
    assert again.to_dict() == found.to_dict()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file has room for more than some bytes."""
    resource = pytest.importorskip("resource", reason="needs POSIX: this system limits no files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("what was there")
    old.chmod(0o640)
    for path in (old, new):
        with full_disk(), pytest.raises(UsageError, match=f"cannot write {path}: "):
            saved.write(path, "x" * 5000)
    assert old.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [old]
    saved.write(old, "y" * 5000)
    assert old.read_text() == "y" * 5000
    assert old.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("why", [errno.EBUSY, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("what", ["open", "replace"])
def test_a_file_in_a_folder_that_takes_no_other_is_written_in_its_place(
    what: str, why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that is mounted into a container."""
    (file := tmp_path / "file").write_text("old")
    own = getattr(Path, what)

    def refused(path: Path, *given: Any, **more: Any) -> Any:
        if path.name.startswith(".jackfield"):
            raise OSError(why, "no")
        return own(path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, what, refused)
        saved.write(file, "new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_link_points_at_is_written_and_a_pipe_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    link, file = tmp_path / "link", tmp_path / "to" / "file"
    link.symlink_to(file)
    saved.write(link, "x")
    assert link.is_symlink()
    assert file.read_text() == "x"
    saved.write(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()


def test_two_flags_name_two_files(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    saved.check_apart({"--a": file, "--b": tmp_path / "other", "--c": None, "--d": None})
    for other in (file, link, tmp_path / "x" / ".." / "file"):
        with pytest.raises(UsageError, match="--a and --b name one file"):
            saved.check_apart({"--a": file, "--b": other})


def verdicts(before: Any, after: Any) -> dict[str, str | None]:
    found = saved.compare(before, after)
    return {one.label: one.change and str(one.change.verdict) for one in found.rows}


def test_each_row_is_compared_with_itself() -> None:
    before = run(row("a", FAST), row("b", FAST), row("c", SLOW))
    after = run(row("a", SLOW), row("b", FAST), row("c", FAST))
    assert verdicts(before, after) == {"a": "slower", "b": "unchanged", "c": "faster"}
    found = saved.compare(before, after)
    assert found.failed
    assert found.yardstick is None
    assert found.notes == ()
    assert not saved.compare(after, before).rows[1].failed


def test_the_same_rounds_twice_are_unchanged() -> None:
    still = [0.1 + n / 10000 for n in range(12)]
    found = saved.compare(run(row("a", still)), run(row("a", still)))
    assert found.rows[0].change is not None
    assert found.rows[0].change.verdict is Verdict.UNCHANGED
    assert not found.failed


def test_a_slower_machine_is_no_slower_program_beside_another_one() -> None:
    before = run(row("a", FAST), row("generate", FAST, "generate"))
    slower = run(row("a", SLOW), row("generate", SLOW, "generate"))
    assert verdicts(before, slower) == {"a": "unchanged"}
    assert saved.compare(before, slower).yardstick == "generate"
    worse = run(row("a", [1.2 * t for t in SLOW]), row("generate", SLOW, "generate"))
    assert verdicts(before, worse) == {"a": "slower"}


def test_rows_without_a_partner_say_so() -> None:
    bad = row("b", FAST, reasons=("wrong tokens",))
    other = replace(row("c", FAST), arguments={"model": "another"})
    before, after = run(row("a", FAST), row("b", FAST)), run(bad, other)
    found = {one.label: one for one in saved.compare(before, after).rows}
    assert (found["b"].failed, found["b"].why) == (True, "it is invalid: wrong tokens")
    assert (found["c"].failed, found["c"].why) == (False, "it is not in the saved run")
    assert (found["a"].failed, found["a"].why) == (False, "it is not in this run")
    now = saved.compare(run(bad), run(row("b", FAST))).rows[0]
    assert (now.failed, now.why) == (False, "it was invalid in the saved run")


def test_a_row_with_another_label_is_known_by_its_selection() -> None:
    """A label is made of what differs among the rows of a run."""
    gguf, int8 = ({"model": "m", "quantization": name} for name in ("gguf", "gguf?int8"))
    before = run(replace(row("gguf", FAST), arguments=gguf),
                 replace(row("int8", FAST), arguments=int8))  # fmt: skip
    after = run(replace(row("gguf + native", SLOW), arguments=gguf))
    found = {one.label: one for one in saved.compare(before, after).rows}
    assert found["gguf + native"].failed
    assert found["int8"].why == "it is not in this run"
    twice = run(*(replace(row(label, SLOW), arguments=gguf) for label in ("x", "y")))
    with pytest.raises(UsageError, match="no row in common"):
        saved.compare(run(replace(row("gguf", FAST), arguments=gguf)), twice)


def test_what_differs_around_them_is_told() -> None:
    found = saved.compare(run(row("a", FAST)), run(row("a", FAST), machine="another", torch="3"))
    assert found.notes == (
        "hardware: a processor before, another now", "torch: 2 before, 3 now",
    )  # fmt: skip


def test_another_workload_is_refused() -> None:
    other = run(row("a", FAST), work={**WORK, "digest": "e", "seed": 3})
    with pytest.raises(UsageError, match=r"another workload .*seed 0, now chat .*seed 3"):
        saved.compare(run(row("a", FAST)), other)


BROKEN = [
    lambda run: run | {"format": "jackfield benchmark 0"},
    lambda run: [],
    lambda run: {k: v for k, v in run.items() if k != "workload"},
    lambda run: run | {"rows": [{k: v for k, v in run["rows"][0].items() if k != "rounds"}]},
    lambda run: run | {"rows": [run["rows"][0] | {"rounds": [{"seconds": 1}]}]},
    lambda run: run | {"rows": [run["rows"][0] | {
        "rounds": [{"seconds": "x", "first": None, "per_token": None}]}]},
    lambda run: run | {"rows": [run["rows"][0] | {
        "rounds": [{"seconds": 0, "first": None, "per_token": None}]}]},
    lambda run: run | {"rows": [run["rows"][0], run["rows"][0] | {
        "rounds": run["rows"][0]["rounds"][1:]}]},
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_is_no_run_is_refused(broken: Any, tmp_path: Path) -> None:
    saved.save(run(row("a", FAST)), tmp_path / "run.json")
    whole = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(broken(whole)))
    with pytest.raises(UsageError, match=r"run\.json (is no run|was changed).*save one anew"):
        saved.read(tmp_path / "run.json")


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        saved.read(tmp_path / "nowhere.json")
    (tmp_path / "text").write_text("{")
    with pytest.raises(UsageError, match="is no run"):
        saved.read(tmp_path / "text")


@pytest.mark.parametrize("flag", ["--html", pytest.param("--save", marks=pytest.mark.long)])
def test_what_cannot_be_written_is_one_line(cli: Cli, tmp_path: Path, flag: str) -> None:
    file = tmp_path / "a.json"
    saved.save(run(row("mine", FAST)), file)
    if flag == "--html":
        asked = ["compare", str(file), str(file), flag, "/dev/full"]
    else:
        asked = [
            "--attention",
            "sdpa",
            "--rounds=1",
            "--requests=1",
            "--new-tokens=2",
            flag,
            "/dev/full",
        ]
    cli("bench", *asked).assert_failed(2, "cannot write /dev/full: No space left on device")


def test_two_saved_runs_are_compared_on_the_command_line(cli: Cli, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, times in zip(files, (FAST, SLOW), strict=True):
        saved.save(run(row("mine", times)), file)
    done = cli("bench", "compare", *map(str, files), "--html", str(tmp_path / "page.html"))
    assert done.code == 1
    assert "slower" in done.out
    assert "add --rival" in done.err
    assert "Beside the saved run" in (tmp_path / "page.html").read_text()
    done = cli("bench", "compare", *map(str, files[::-1]), "--json")
    assert done.code == 0
    assert done.json["comparison"]["rows"][0]["change"]["verdict"] == "faster"


def test_runs_without_a_common_row_are_no_comparison() -> None:
    """Or a label that has changed would be green for ever."""
    with pytest.raises(UsageError, match=r"no row in common \(before: a, b; after: c\); measure"):
        saved.compare(run(row("a", FAST), row("b", FAST)), run(row("c", FAST)))
