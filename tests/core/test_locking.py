"""A lock runs what was locked, and refuses everything else by name."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jackfield
from jackfield.cli import run
from jackfield.errors import PlanError, UsageError
from jackfield.planning.installed_code import content_of, versions_of
from jackfield.planning.locking import lock_of

CHOSEN: dict[str, Any] = {
    "attn_implementation": "sdpa",
    "cache_implementation": "paged?page_size=32&prefix_sharing=false",
    "decoding": {"fast": "prompt_lookup"},
    "kernels": "cpu-rms-norm",
}


@pytest.fixture(scope="module")
def lock() -> Any:
    found = lock_of(jackfield.plan("demo", **CHOSEN))
    return json.loads(json.dumps(found))


def written(folder: Path, content: Any) -> Path:
    path = folder / "a.lock.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_lock_chooses_what_is_left_open(lock: Any, tmp_path: Path) -> None:
    file = written(tmp_path, lock)
    found = jackfield.plan("demo", locked=file)
    assert json.loads(json.dumps(lock_of(found))) == lock
    assert found["cache"].options.page_size == 32
    assert set(found.decodings) == set(jackfield.plan("demo", **CHOSEN).decodings)
    with jackfield.load("demo", locked=str(file)) as engine:
        assert engine.generate("a", max_new_tokens=2)[0].finish_reason in ("length", "stop")


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def test_every_change_is_refused_and_named(lock: Any, tmp_path: Path) -> None:
    """Whatever is in the lock is compared: no leaf of it may be another."""
    paths = [path for path, _ in leaves(lock)]
    assert len(paths) > 40
    for path in paths:
        changed = copy.deepcopy(lock)
        *parents, last = path
        inner = changed
        for key in parents:
            inner = inner[key]
        inner[last] = {"text": "other", "dict": {"other": "1"}}.get(
            "dict" if isinstance(inner[last], dict) else "text"
        )
        with pytest.raises(UsageError) as caught:
            jackfield.plan("demo", locked=written(tmp_path, changed))
        said = str(caught.value)
        assert len(said.splitlines()) == 1
        assert "lock" in said or "option" in said, (path, said)


@pytest.mark.parametrize("role", ["scheduler", "kernel cpu-rms-norm", "decoding fast"])
def test_what_is_left_out_of_a_lock_does_not_run(lock: Any, tmp_path: Path, role: str) -> None:
    changed = copy.deepcopy(lock)
    del changed["backends"][role]
    with pytest.raises(PlanError, match=f"{role} .* runs, and is not in it"):
        jackfield.plan("demo", locked=written(tmp_path, changed), **CHOSEN)


def test_a_caller_cannot_choose_past_a_lock(lock: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"attention was sdpa of jackfield .* and is eager"):
        jackfield.plan("demo", locked=written(tmp_path, lock), attn_implementation="eager")
    with pytest.raises(PlanError, match=r"cache paged had the options .* and has"):
        jackfield.plan("demo", locked=written(tmp_path, lock), cache_implementation="paged")


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "1", '{"version": 1}',
        '{"version": 1, "backends": [], "libraries": {}}',
        '{"version": 1, "backends": {"attention": {}}, "libraries": {}}',
        '{"version": 1, "backends": {}, "libraries": {"torch": 2}}', "[" * 100_000,
        '{"version": 1, "backends": {}, "libraries": {}}' + " " * 1_100_000, "\x00\xff",
    ],
)  # fmt: skip
def test_what_is_no_lock_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="is no lock of jackfield"):
        jackfield.plan("demo", locked=written(tmp_path, content))


def test_a_lock_that_is_not_there_or_of_later_is_refused(lock: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no lock"):
        jackfield.plan("demo", locked=tmp_path / "none.json")
    with pytest.raises(UsageError, match="there is no lock"):
        jackfield.plan("demo", locked=tmp_path)
    with pytest.raises(UsageError, match="of version 2, and this jackfield reads 1"):
        jackfield.plan("demo", locked=written(tmp_path, {**lock, "version": 2}))


PLUGIN = """
from jackfield import hookimpl
from jackfield.contracts import Scheduler

class Mine(Scheduler):
    name = "mine"
    def bind(self, context):
        from jackfield_plugins.scheduler.fifo import Fifo
        return Fifo().bind(context)

@hookimpl
def jackfield_scheduler():
    return [Mine()]
"""


def package(folder: Path, version: str = "1.0") -> Path:
    """A distribution that is installed in `folder`, as an editable one is: by a path."""
    (folder / "my_scheduler.py").write_text(PLUGIN)
    info = folder / f"my_scheduler-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: my-scheduler\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text("[jackfield]\nmine = my_scheduler\n")
    return folder


PLAN = "import sys, jackfield; jackfield.plan('demo', locked=sys.argv[1])"
LOCK = """
import json, sys, jackfield
from jackfield.planning.locking import lock_of
plan = jackfield.plan("demo", scheduler="plugin:my-scheduler/mine")
json.dump(lock_of(plan), open(sys.argv[1], "w"))
"""


def command(*arguments: str, path: Path | None, folder: Path) -> tuple[int, str]:
    import os

    env = {**os.environ, "PYTHONPATH": str(path) if path else "", "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", *arguments],
        env=env, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_a_strangers_files_are_locked_wherever_they_are(tmp_path: Path) -> None:
    first = package(_made(tmp_path / "first"))
    file = str(tmp_path / "l.json")
    assert command(LOCK, file, path=first, folder=tmp_path)[0] == 0
    locked = (PLAN, file)
    assert command(*locked, path=first, folder=tmp_path)[0] == 0
    moved = package(_made(tmp_path / "moved"))
    assert command(*locked, path=moved, folder=tmp_path)[0] == 0
    (moved / "my_scheduler.py").write_text(PLUGIN + "\n# another line\n")
    code, said = command(*locked, path=moved, folder=tmp_path)
    assert code == 1
    assert "the files of mine of my-scheduler 1.0, which scheduler runs on, are sha256:" in said
    later = package(_made(tmp_path / "later"), "1.1")
    code, said = command(*locked, path=later, folder=tmp_path)
    assert code == 1
    assert "scheduler was mine of my-scheduler 1.0 and is mine of my-scheduler 1.1" in said
    code, said = command(*locked, path=None, folder=tmp_path)
    assert code == 1
    assert "locks what is not installed here" in said
    (first / "my_scheduler.py").unlink()  # an editable install whose folder moved away
    code, said = command(*locked, path=first, folder=tmp_path)
    assert code == 1
    assert "the module my_scheduler, which does not exist" in said


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_contents_do_not_depend_on_bytecode_or_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("one", "two"):
        root = _made(tmp_path / name)
        _made(root / "packed_up")
        (root / "packed_up/__init__.py").write_text("x = 1\n")
        _made(root / "packed_up/__pycache__")
        (root / "packed_up/__pycache__/a.pyc").write_text(name)
        monkeypatch.syspath_prepend(root)
        content_of.cache_clear()
        found.append(content_of("packed_up.inner"))
        monkeypatch.undo()
    assert found[0] == found[1]
    assert found[0].startswith("sha256:")


def zipped(folder: Path) -> str:
    with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
        archive.writestr("in_an_archive/__init__.py", "x = 1\n")
    return "in_an_archive"


def emptied(folder: Path) -> str:
    _made(folder / "without_files")
    return "without_files"


@pytest.mark.parametrize(
    "named",
    [
        lambda _: "no_such_package_at_all",
        lambda _: "made_by_hand",
        lambda _: "sys",
        zipped,
        emptied,
    ],
    ids=["nowhere", "by hand", "built in", "archive", "empty"],
)
def test_a_backend_without_files_is_not_locked(
    named: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them would have the same content, whatever they do."""
    module = named(tmp_path)
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "packed.zip")
    with pytest.raises(PlanError, match=rf"cannot lock {module}\.inner: the files of {module} are"):
        content_of(f"{module}.inner")


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_for_all.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(PlanError, match=r"not_for_all\.py cannot be read: Permission denied"):
        content_of("not_for_all")


@pytest.mark.parametrize(
    ("requires", "told"),
    [
        (None, "cannot lock my-scheduler: it has no metadata here"),
        (["torch>=2", "torch >= = 2"], "has a requirement that cannot be read: 'torch >= = 2'"),
    ],
)
def test_what_cannot_be_known_of_a_distribution_is_no_lock(
    requires: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(name: str) -> Any:
        if requires is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return requires

    monkeypatch.setattr(importlib.metadata, "requires", asked)
    with pytest.raises(PlanError, match=told):
        versions_of({"my-scheduler"})


def test_a_requirement_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    named = ["no-such-thing-at-all>=1", "only-with-an-extra; extra == 'more'", "rich"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: named)
    found = versions_of({"my-scheduler"})
    assert found["no-such-thing-at-all"] == "not there"
    assert found["rich"] == importlib.metadata.version("rich")
    assert "only-with-an-extra" not in found


def test_the_command_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "l.json"
    assert run(["lock", "--attention", "sdpa", "-o", str(file)]) == 0
    assert "backends" in capsys.readouterr().err
    assert run(["explain", "--locked", str(file), "--attention", "eager"]) == 2
    assert "attention was sdpa of jackfield" in capsys.readouterr().err
    assert run(["lock", "-o", str(tmp_path / "no/such/folder.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
