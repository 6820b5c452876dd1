"""Private files: whole or not there, whoever writes at once; and nobody else's."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jackfield.contracts import private_files
from jackfield.contracts.private_files import NotPrivateError, read, write

SOMEBODY = 12345


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_only_the_user_can_read_what_is_written(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "made" / "here" / "file"
    before = os.umask(mask)
    try:
        write(path, b"first")
        write(path, b"second")
    finally:
        os.umask(before)
    assert read(path) == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    for folder in (path.parent, path.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write(tmp_path / "file", b"")
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_another_process_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[Path] = set()
    is_dir = Path.is_dir

    def first_no(path: Path) -> bool:
        before = path in asked
        asked.add(path)
        return before and is_dir(path)

    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(Path, "is_dir", first_no)
    write(tmp_path / "a" / "b" / "file", b"written")
    assert read(tmp_path / "a" / "b" / "file") == b"written"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write(path, b"before")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write(path, b"after")
    assert read(path) == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("below", ["file", "file/a", "file/a/b"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is not a folder"):
        write(tmp_path / below / "x", b"")


def given_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, SOMEBODY, SOMEBODY)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.skipif(os.name == "nt", reason="modes and owners are POSIX")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("attack", "told"),
    [
        (lambda path: path.chmod(0o602), "can be written by others"),
        (lambda path: path.chmod(0o620), "can be written by others"),
        (given_away, f"belongs to somebody else \\(user {SOMEBODY}\\)"),
        (pipe, "is not a file"),
        (device, "Too many levels"),
        (folder, "Is a directory|is not a file"),
        (Path.unlink, "No such file"),
    ],
)
def test_what_others_may_have_written_is_not_read(
    tmp_path: Path, attack: Callable[[Path], None], told: str
) -> None:
    path = tmp_path / "file"
    write(path, b"mine")
    attack(path)
    with pytest.raises(OSError, match=told):
        read(path)


@pytest.mark.skipif(os.name == "nt", reason="owners are POSIX")
def test_what_root_wrote_is_read_by_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write(path, b"of an administrator")
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
        assert read(path) == b"of an administrator"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
        with pytest.raises(NotPrivateError):
            read(path)


WRITER = """
import sys
from pathlib import Path
from jackfield.contracts.private_files import read, write
path, letter = Path(sys.argv[1]), sys.argv[2].encode()
for turn in range(150):
    write(path, letter * (turn * 997 % 60_000 + 1))
    assert len(set(read(path))) == 1
"""


def test_processes_and_threads_at_once(tmp_path: Path) -> None:
    """Nobody reads a part of a file, or of two; the folder is made once; nothing is left over."""
    path = tmp_path / "made" / "by" / "all" / "file"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, letter]) for letter in "abc"]
    mixed: list[bytes] = []

    def watch() -> None:
        while any(writer.poll() is None for writer in writers):
            try:
                content = read(path)
            except FileNotFoundError:
                continue
            if len(set(content)) != 1:
                mixed.append(content)

    readers = [threading.Thread(target=watch) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    for reader in readers:
        reader.join()
    assert not mixed
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("named", "found"), [("/x", "/x/jackfield"), ("", ".cache/jackfield")])
def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, named: str, found: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert private_files.cache_folder() == Path.home() / found


def test_without_a_home_there_is_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert private_files.cache_folder() is None


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the root of all files, where root may write."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    assert private_files.cache_folder() is None
