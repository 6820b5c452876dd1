"""Where inductor keeps what it compiled: nobody else's folder, or an error that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import build

import jackfield
from jackfield.errors import ExecutionError, PlanError, unusable_folder
from jackfield_plugins.compiler.inductor_cache import CACHE_DIR, cache_folder


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept there yet. Kernels would be compiled anew for the advice of a plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.delenv(CACHE_DIR, raising=False)
    return tmp_path / "jackfield" / "inductor"


def used() -> str:
    with cache_folder():
        return os.environ[CACHE_DIR]


def test_what_is_compiled_is_kept_where_nobody_else_writes(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert used() == str(caches)
    assert caches.stat().st_mode & 0o777 == 0o700
    assert CACHE_DIR not in os.environ
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(CACHE_DIR, default_cache_dir())  # as torch itself does
    assert used() == str(caches)
    assert os.environ[CACHE_DIR] == default_cache_dir()
    monkeypatch.setenv(CACHE_DIR, "")
    assert used() == str(caches)
    caches.chmod(0o777)
    with pytest.raises(ExecutionError, match="others can write to"):
        used()


def test_the_folder_that_the_caller_names(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = caches.with_name("a folder of\nmine") / "below"
    monkeypatch.setenv(CACHE_DIR, str(named))
    assert used() == str(named) == os.environ[CACHE_DIR]
    assert named.stat().st_mode & 0o777 == 0o700
    named.chmod(0o770)
    with pytest.raises(ExecutionError, match=f"others can write to .*set {CACHE_DIR}"):
        used()


BAD = {
    "relative": "relative is not an absolute path",
    "/dev/null": "/dev/null is not a folder",
    "/dev/null/below": "/dev/null is not a folder",
    "/" + "x" * 300: "File name too long",
    "/" + "x/" * 5000: "File name too long",
}


@pytest.mark.parametrize("named", BAD)
@pytest.mark.parametrize("variable", [CACHE_DIR, "XDG_CACHE_HOME"])
@pytest.mark.one_in(4)
def test_a_folder_that_cannot_be_is_refused_in_the_plan(
    monkeypatch: pytest.MonkeyPatch, variable: str, named: str
) -> None:
    monkeypatch.delenv(CACHE_DIR, raising=False)
    monkeypatch.setenv(variable, named)
    told = BAD[named].replace("relative is", "relative/jackfield/inductor is")
    told = BAD[named] if variable == CACHE_DIR else told
    with pytest.raises(PlanError) as caught:
        jackfield.plan("demo", compile="inductor", attn_implementation="sdpa")
    assert told in str(caught.value)
    assert f"set {variable} to" in str(caught.value)
    with pytest.raises(ExecutionError) as again:
        used()
    assert f"set {variable} to" in str(again.value)
    jackfield.plan("demo", compile="inductor?backend=eager", attn_implementation="sdpa")
    assert os.environ[variable] == named


def test_a_folder_that_others_write_to_is_refused_in_the_plan(caches: Path) -> None:
    caches.mkdir(parents=True)
    caches.chmod(0o777)
    with pytest.raises(PlanError, match=r"others can write to .*; make it yours"):
        jackfield.plan("demo", compile="inductor", attn_implementation="sdpa")


def test_a_folder_that_goes_bad_fails_each_request(caches: Path) -> None:
    with jackfield.load(
        build("llama"),
        compile="inductor",
        cache_implementation="paged",
        attn_implementation="sdpa",
    ) as engine:
        caches.mkdir(parents=True)
        caches.chmod(0o777)
        for _ in range(2):
            said = r"^compiler 'inductor' of .*: others can write to .*; make it yours"
            with pytest.raises(ExecutionError, match=said):
                engine.generate([5, 6, 7], max_new_tokens=4)
        assert engine.report()["compiler"].calls == 0


@pytest.mark.parametrize(
    "named", [name for name in BAD if name.startswith("/") and len(name) < 1000]
)
def test_what_torch_says_of_such_a_folder_is_known(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv(CACHE_DIR, named)
    with pytest.raises(OSError, match="Errno") as caught:
        os.makedirs(named)
    said = str(unusable_folder(caught.value))
    assert said.startswith(f"{CACHE_DIR}=")
    assert len(said) < 500
    assert unusable_folder(FileNotFoundError(2, "No such file", "/elsewhere")) is None
    assert unusable_folder(OSError("no name")) is None
    monkeypatch.delenv(CACHE_DIR)
    assert unusable_folder(caught.value) is None


@pytest.mark.parametrize("named", ["/" + "d/" * 2000, "d/" * 1500])
def test_folders_nested_too_deeply_for_python_are_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str
) -> None:
    monkeypatch.setenv(CACHE_DIR, named)
    monkeypatch.chdir(tmp_path)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own: a compile in this process raises it to 2,000
    try:
        with pytest.raises(RecursionError) as caught:
            os.makedirs(tmp_path / named.lstrip("/"))
    finally:
        sys.setrecursionlimit(limit)
    later = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    later.__cause__ = caught.value
    for error in (caught.value, later):
        said = str(unusable_folder(error))
        assert "folders inside of one another" in said
        assert len(said) < 500
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    assert unusable_folder(later) is None


#: What can stand in the environment and is no folder that can be made: part of the message.
NO_FOLDERS = {
    "/dev/null/below": "Not a directory",
    "/" + "d/" * 2000: "2000 folders inside of one another",
}


@pytest.mark.parametrize("named", NO_FOLDERS)
@pytest.mark.parametrize(
    "call", ["jackfield.load", "sys.exit(run(['generate', 'hi', '--compile', 'inductor']))"]
)
@pytest.mark.one_in(4)
def test_a_folder_that_torch_cannot_make_is_named_where_torch_comes_in(
    call: str, named: str
) -> None:
    """torch makes it while transformers is imported, before anything is planned."""
    code = f"import sys, jackfield; from jackfield.cli import run; {call}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, CACHE_DIR: named}, capture_output=True, text=True,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode
    assert f"{CACHE_DIR}='{named[:5]}" in last
    assert f"is no folder that torch can use ({NO_FOLDERS[named]})" in last
    assert "unexpected" not in done.stderr
