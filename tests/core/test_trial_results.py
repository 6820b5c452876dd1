"""What is remembered of tried plugins: it holds for what is installed, and harms nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jackfield.registry import trial_results
from jackfield.registry.trial_results import TrialResult, path_of, recall, remember

if TYPE_CHECKING:
    from conftest import Site

KNOWN = TrialResult(writes=True, seconds=20.0, changes={"the current folder": [""]})
REFUSED = TrialResult("it ended its process", seconds=20.0)


def entry_point(site: Site) -> EntryPoint:
    found = distributions(path=[str(site.folder)])
    (only,) = [e for d in found for e in d.entry_points.select(group="jackfield")]
    return only


@pytest.fixture
def known(site: Site) -> EntryPoint:
    """An entry point with a result."""
    site.add("mine", site.attention("mine"))
    found = entry_point(site)
    assert recall(found, 20.0) is None
    path = remember(found, REFUSED)
    assert path == path_of(found)
    assert recall(found, 20.0) == REFUSED
    return found


def test_more_time_is_another_chance(known: EntryPoint) -> None:
    assert recall(known, 5.0) == REFUSED
    assert recall(known, 21.0) is None
    remember(known, KNOWN)
    assert recall(known, 21.0) == KNOWN


@pytest.mark.parametrize("what", ["METADATA", "RECORD", "module"])
def test_another_installation_is_another_chance(known: EntryPoint, site: Site, what: str) -> None:
    (info,) = site.folder.glob("*.dist-info")
    path = site.folder / "outside_mine.py" if what == "module" else info / what
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert recall(entry_point(site), 20.0) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"key"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"key": 1}',
        b'{"refused": 7, "writes": false, "seconds": 20.0, "changes": {}, "key": KEY}',
        b'{"refused": null, "writes": null, "seconds": 20.0, "changes": {}, "key": KEY}',
        b'{"refused": null, "writes": false, "seconds": "x", "changes": {}, "key": KEY}',
        b'{"refused": null, "writes": false, "seconds": 20.0, "key": KEY}',
        b'{"refused": null, "writes": false, "seconds": 20.0, "changes": 1, "key": KEY}',
        b'{"refused": null, "writes": false, "seconds": 20.0, "changes": {"a": [1]}, "key": KEY}',
        b'{"refused": null, "more": 1, "key": KEY}',
    ],
)
def test_a_damaged_file_says_nothing(known: EntryPoint, content: bytes) -> None:
    path = path_of(known)
    assert path is not None
    path.write_bytes(content.replace(b"KEY", f'"{trial_results._key(known)}"'.encode()))
    assert recall(known, 20.0) is None
    remember(known, REFUSED)
    assert recall(known, 20.0) == REFUSED


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_a_file_that_others_may_write_says_nothing(known: EntryPoint, mode: int) -> None:
    path = path_of(known)
    assert path is not None
    path.chmod(mode)
    assert recall(known, 20.0) is None


@pytest.mark.skipif(os.name == "nt", reason="owners are POSIX")
def test_a_file_of_somebody_else_says_nothing(
    known: EntryPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(known)
    assert path is not None
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:  # what belongs to root is everybody's to trust
        os.chown(path, 12345, 12345)
    assert recall(known, 20.0) is None


@pytest.mark.parametrize("where", ["no home", "a file in the way", "a relative path"])
def test_where_nothing_can_be_written_nothing_is_remembered(
    known: EntryPoint, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.chdir(tmp_path)
    folder = {"no home": None, "a file in the way": blocked, "a relative path": Path("cache")}[
        where
    ]
    monkeypatch.setattr(trial_results, "cache_folder", lambda: folder)
    assert remember(known, REFUSED) is None
    assert recall(known, 20.0) is None


WRITER = """
import sys
from importlib.metadata import distributions
from pathlib import Path
from jackfield.registry import trial_results
trial_results.cache_folder = lambda: Path(sys.argv[2])
(dist,) = distributions(path=[sys.argv[1]])
(entry_point,) = dist.entry_points
for turn in range(200):
    shown = trial_results.TrialResult("x" * turn * 50, seconds=20.0)
    assert trial_results.remember(entry_point, shown)
    assert trial_results.recall(entry_point, 20.0) is not None
"""


def test_several_processes_at_once(known: EntryPoint, site: Site, tmp_path: Path) -> None:
    """Nobody ever reads half a file, and none is left over."""
    command = [sys.executable, "-c", WRITER, str(site.folder), str(tmp_path / "cache")]
    writers = [subprocess.Popen(command) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    path = path_of(known)
    assert path is not None
    assert list(path.parent.iterdir()) == [path]
