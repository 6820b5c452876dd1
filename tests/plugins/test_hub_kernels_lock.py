"""The lock file: the bytes of a kernel are those of its first use, or it is refused."""

from __future__ import annotations

import functools
import json
import os
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from families import build, config_of, prompts, references

import jackfield
from jackfield.errors import PlanError
from jackfield_plugins.hub_kernels import KernelRefused, lock

pytestmark = pytest.mark.usefixtures("local_kernels")

FLASH = "plugin:hub?repo=me/flash&revision=v1"
MADE = "plugin:hub?repo=me/kernel&revision=v1"
SOURCE = (Path(__file__).parent / "kernels/flash.py").read_text()

model_of = functools.cache(build)


def refusal(attention: str) -> str:
    with pytest.raises(PlanError) as caught:
        jackfield.plan(config_of("llama"), attn_implementation=attention)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_first_use_is_recorded_and_a_change_is_refused(kernel, lock_file: Path) -> None:
    folder = kernel(SOURCE) / "build/torch-cpu"
    first = lock.digest(folder)
    jackfield.plan(config_of("llama"), attn_implementation=MADE)
    written = json.loads(lock_file.read_text())
    assert written == {"version": 1, "kernels": {"me/kernel@v1/torch-cpu": first}}
    jackfield.plan(config_of("llama"), attn_implementation=MADE)
    assert json.loads(lock_file.read_text()) == written
    (folder / "__init__.py").write_text(SOURCE + "\n# another line\n")
    message = refusal(MADE)
    assert "its content has changed: me/kernel@v1/torch-cpu is sha256:" in message
    assert f"delete its entry in {lock_file}" in message
    jackfield.plan(config_of("llama"), attn_implementation=MADE.replace("v1", "v2"))


def test_a_file_that_is_added_is_a_change(kernel) -> None:
    folder = kernel(SOURCE) / "build/torch-cpu"
    jackfield.plan(config_of("llama"), attn_implementation=MADE)
    (folder / "__pycache__").mkdir(exist_ok=True)
    (folder / "__pycache__/x.pyc").write_bytes(b"")
    jackfield.plan(config_of("llama"), attn_implementation=MADE)
    (folder / "more.so").write_bytes(b"")
    assert "its content has changed" in refusal(MADE)


def test_planted_bytecode_is_not_run(kernel) -> None:
    folder = kernel(SOURCE) / "build/torch-cpu"
    jackfield.plan(config_of("llama"), attn_implementation=MADE)
    source = folder / "__init__.py"
    evil = folder.parent / "evil.py"
    evil.write_text("raise SystemExit('planted')")
    cached = cache_from_source(str(source))
    py_compile.compile(str(evil), cached, doraise=True)
    bytecode = bytearray(Path(cached).read_bytes())
    bytecode[4:16] = (
        (0).to_bytes(4, "little")
        + int(source.stat().st_mtime).to_bytes(4, "little")
        + source.stat().st_size.to_bytes(4, "little")
    )
    Path(cached).write_bytes(bytecode)
    with jackfield.load(model_of("llama"), attn_implementation=MADE) as engine:
        (found,) = engine.generate(prompts((5,)), max_new_tokens=2)
    assert found.token_ids == references("llama", (5,), 2)[0]


BROKEN = ["", "{", "[]", '{"kernels": 3}', '{"kernels": {"a": 1}}', "\xff", "[" * 100_000]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_lock_file(text: str, lock_file: Path) -> None:
    lock_file.parent.mkdir()
    lock_file.write_bytes(text.encode("latin-1"))
    lock_file.chmod(0o600)
    assert f"the lock file {lock_file} is broken" in refusal(FLASH)


def test_a_lock_file_that_others_may_write(lock_file: Path) -> None:
    lock.record("me/flash", "sha256:1")
    assert lock_file.stat().st_mode & 0o77 == 0
    lock.check("me/flash", "sha256:1")
    lock_file.chmod(0o602)
    with pytest.raises(KernelRefused, match=r"can be written by others; make it yours alone"):
        lock.check("me/flash", "sha256:1")


def test_a_lock_file_that_is_a_pipe(lock_file: Path) -> None:
    lock_file.parent.mkdir()
    os.mkfifo(lock_file)
    with pytest.raises(KernelRefused, match="is not a file"):
        lock.check("me/flash", "sha256:1")


def test_a_lock_file_that_is_a_link_stays_one(lock_file: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings of mine"
    settings.mkdir()
    lock_file.parent.mkdir()
    lock_file.symlink_to(settings / "kernels")
    lock.record("me/flash", "sha256:1")
    assert lock_file.is_symlink()
    assert "sha256:1" in (settings / "kernels").read_text()
    lock.check("me/flash", "sha256:1")
    lock_file.unlink()
    lock_file.symlink_to(lock_file)
    with pytest.raises(KernelRefused, match="cannot be read"):
        lock.check("me/flash", "sha256:1")


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("JACKFIELD_KERNEL_LOCK", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(KernelRefused, match="name one with JACKFIELD_KERNEL_LOCK"):
        lock.check("me/flash", "sha256:1")


def test_a_lock_file_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JACKFIELD_KERNEL_LOCK", str(tmp_path / "file" / "lock.json"))
    message = refusal(FLASH)
    assert "lock" in message
    assert str(tmp_path / "file" / "lock.json") in message


def test_a_link_to_a_folder_is_refused(kernel, tmp_path: Path) -> None:
    folder = kernel(SOURCE) / "build/torch-cpu"
    (tmp_path / "elsewhere").mkdir()
    (folder / "part").symlink_to(tmp_path / "elsewhere")
    assert "is a link to a folder" in refusal(MADE)


def test_the_lock_file_lies_with_the_users_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JACKFIELD_KERNEL_LOCK")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert lock.lock_path() == tmp_path / "jackfield" / "kernels.lock.json"
