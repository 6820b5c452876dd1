"""Kernels in the user's cache: what was damaged, changed or put there by others is not loaded.

A compiler that copies a library stands in for a real one, so that hundreds of attacks take seconds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import random
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jackfield
from jackfield.errors import PlanError
from jackfield_plugins.native import NativeKernel, compiling, keeping

if TYPE_CHECKING:
    from forking import Forks

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or compiling.compiler() is None,
    reason="needs a C++ compiler, on Linux",
)

SOMEBODY = 12345
COMPILER = """#!/bin/sh
case "$*" in *--version*) echo copy; exit;; esac
echo x >> CALLS
while [ "$1" != -o ]; do shift; done
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """Real libraries whose `answer` is the number."""
    folder, found = tmp_path_factory.mktemp("libraries"), {}
    command = compiling.compiler()
    assert command is not None
    for number in (42, 13):
        source, made = folder / f"{number}.cpp", folder / f"{number}.so"
        source.write_text(f'extern "C" int answer() {{ return {number}; }}')
        subprocess.run([*command, "-shared", "-fPIC", source, "-o", made], check=True)
        found[number] = made.read_bytes()
    return found


class Cache:
    """A kernel whose answer is 42, the cache that it is in, and its compiler."""

    def __init__(self, folder: Path, library: bytes) -> None:
        self.folder = folder
        self.source = folder / "source"
        self.source.mkdir()
        (self.source / "kernel.cpp").write_text("// copied")
        self.calls = folder / "calls"
        (folder / "library").write_bytes(library)
        self.script = folder / "c++"
        self.write_compiler(f'cp {folder / "library"} "$2"')
        self.home = folder / "cache"

    def write_compiler(self, *lines: str) -> None:
        self.script.write_text(COMPILER.replace("CALLS", str(self.calls)) + "\n".join(lines))
        self.script.chmod(0o755)

    def answer(self, name: str = "tiny") -> int:
        """As a process that has not loaded it yet."""
        library: ctypes.CDLL = NativeKernel(name, self.source, "'sdpa'").library()
        return int(library.answer())

    @property
    def compiled(self) -> int:
        return len(self.calls.read_text().split()) if self.calls.exists() else 0

    @property
    def path(self) -> Path:
        (found,) = (self.home / "jackfield").glob("tiny-*.so")
        return found


@pytest.fixture
def cache(tmp_path: Path, libraries: dict[int, bytes], monkeypatch: pytest.MonkeyPatch) -> Cache:
    made = Cache(tmp_path, libraries[42])
    monkeypatch.setenv("CXX", str(made.script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.home))
    return made


def damages(whole: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    """What a file may hold in place of `whole`."""
    sizes = {0, 1, 31, 32, 33, 63, 64, 100, 4095, 4096, 4097, len(whole) // 2}
    for size in sorted({*sizes, *(len(whole) - n for n in (1, 31, 32, 33, 4096))}):
        yield f"cut off at {size}", whole[:size]
    draw = random.Random(0)
    for at in (0, 4, 16, len(whole) - 1, *draw.sample(range(len(whole)), 60)):
        changed = bytearray(whole)
        changed[at] ^= 1 << draw.randrange(8)
        yield f"a bit of byte {at}", bytes(changed)
    yield "more at its end", whole + b"\0"
    yield "another library", other
    yield "another library with the old digest", other + whole[-32:]
    yield "nothing but zeros", bytes(len(whole))
    yield "twice", whole * 2


def test_a_damaged_kernel_is_compiled_anew(
    cache: Cache, libraries: dict[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    assert (cache.answer(), cache.compiled) == (42, 1)
    assert (cache.answer(), cache.compiled) == (42, 1)
    whole = cache.path.read_bytes()
    attacks = list(damages(whole, libraries[13]))
    for what, content in attacks:
        cache.path.write_bytes(content)
        before = cache.compiled
        assert (cache.answer(), cache.compiled) == (42, before + 1), what
        assert cache.path.read_bytes() == whole, what
    told = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == len(attacks)
    assert {r.getMessage() for r in told} == {
        f"{cache.path} is damaged, or was changed; the kernel of tiny is compiled anew"
    }


def linked(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def copied_and_linked(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(path.read_bytes())
    linked(path, path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def bound(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may not be long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def given_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, SOMEBODY, SOMEBODY)


@pytest.mark.parametrize(
    ("attack", "told"),
    [
        (lambda path: path.chmod(0o666), "can be written by others"),
        (lambda path: path.chmod(0o620), "can be written by others"),
        (given_away, f"belongs to somebody else (user {SOMEBODY})"),
        (lambda path: linked(path, path.with_name("nothing")), "cannot be read (Too many levels"),
        (lambda path: linked(path, path), "cannot be read (Too many levels"),
        (lambda path: linked(path, Path("/dev/zero")), "cannot be read (Too many levels"),
        (copied_and_linked, "cannot be read (Too many levels"),
        (pipe, "is not a file"),
        (bound, "cannot be read (No such device"),
    ],
)
def test_what_others_may_have_put_there_is_compiled_anew(
    cache: Cache, attack: Callable[[Path], None], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.answer() == 42
    path = cache.path
    attack(path)
    assert (cache.answer(), cache.compiled) == (42, 2)
    assert f"{path} {told}" in caplog.text
    found = path.lstat()
    assert stat.S_ISREG(found.st_mode)
    assert (found.st_uid, found.st_mode & 0o77) == (os.geteuid(), 0)


def test_the_kernel_of_another_backend_is_not_taken_for_it(cache: Cache) -> None:
    assert (cache.answer("tiny"), cache.answer("other")) == (42, 42)
    (other,) = (cache.home / "jackfield").glob("other-*.so")
    other.replace(cache.path)
    assert (cache.answer("tiny"), cache.compiled) == (42, 3)


def test_a_library_that_is_loaded_survives_its_file(cache: Cache) -> None:
    """A mapped file that is cut off would end the process in the next call."""
    library = NativeKernel("tiny", cache.source, "'sdpa'").library()
    os.truncate(cache.path, 0)
    assert library.answer() == 42


def test_what_several_want_at_once_is_compiled_once(cache: Cache, forks: Forks) -> None:
    cache.write_compiler("sleep 0.5", f'cp {cache.folder / "library"} "$2"')
    program = (
        "import sys, pathlib\n"
        "from jackfield_plugins.native import NativeKernel\n"
        "source = pathlib.Path(sys.argv[1])\n"
        "print(NativeKernel('tiny', source, \"'sdpa'\").library().answer())\n"
    )
    forks.python("-c", "pass")
    with ThreadPoolExecutor(5) as pool:
        here = pool.map(lambda _: cache.answer(), range(5))
        there = forks.python("-c", program, cache.source)
        found = [*here, int(there.stdout)]
    assert set(found) == {42}
    assert cache.compiled == 1
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


@pytest.mark.parametrize("what", ["held", "unknown"])
def test_a_lock_that_cannot_be_had_is_not_waited_for_for_long(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refused(file: object, how: int) -> None:
        raise BlockingIOError if what == "held" else OSError(errno.ENOLCK, "No locks")

    monkeypatch.setattr(compiling, "making", lambda path, _: keeping.making(path, 0.2))
    monkeypatch.setattr(fcntl, "flock", refused)
    assert cache.answer() == 42


def test_who_was_waited_for_and_failed_is_followed_by_the_next(cache: Cache) -> None:
    cache.write_compiler(
        "sleep 0.2", f'[ $(wc -l < {cache.calls}) = 1 ] || cp {cache.folder / "library"} "$2"'
    )

    def answer(_: int) -> int | None:
        try:
            return cache.answer()
        except PlanError:
            return None

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(answer, range(3)), key=str) == [42, 42, None]
    assert cache.compiled == 2


def test_a_torch_that_keeps_its_threads_to_itself() -> None:
    """As the builds for ARM do: what they load stays unseen by libraries that come later."""
    story = """
import ctypes
ctypes.RTLD_GLOBAL, everywhere = ctypes.RTLD_LOCAL, ctypes.RTLD_GLOBAL
import torch
ctypes.RTLD_GLOBAL = everywhere
assert not hasattr(ctypes.CDLL(None), "GOMP_parallel")
from jackfield_plugins.compiler.native.linears import KERNEL
KERNEL.library()
assert hasattr(ctypes.CDLL(None), "GOMP_parallel")
"""
    done = subprocess.run(
        [sys.executable, "-c", story], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def failure(cache: Cache) -> str:
    with pytest.raises(PlanError) as caught:
        cache.answer()
    message = str(caught.value)
    assert message.startswith("tiny")
    assert message.isprintable()
    return message


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_write_to_is_named(cache: Cache, mode: int) -> None:
    assert cache.answer() == 42
    cache.path.parent.chmod(mode)
    assert f"others can write to {cache.path.parent}" in failure(cache)


def test_a_folder_of_somebody_else_is_named(cache: Cache) -> None:
    assert cache.answer() == 42
    given_away(cache.path.parent)
    assert "belongs to somebody else (user 12345); set XDG_CACHE_HOME" in failure(cache)


@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_folders_are_made_for_their_user_alone(cache: Cache, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert cache.answer() == 42
    finally:
        os.umask(before)
    for path in (cache.home, cache.path.parent, cache.path):
        assert path.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("name", ["with space", "größe-日本", "line\nend", "a'b\"c$d", "x" * 200])
def test_odd_paths(cache: Cache, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cache.home = cache.folder / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.home))
    assert (cache.answer(), cache.answer(), cache.compiled) == (42, 42, 1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("relative", "relative/jackfield is not an absolute path"),
        ("/dev/null", "(/dev/null is not a folder); set XDG_CACHE_HOME"),
        ("/proc/nothing", "cannot be kept in /proc/nothing/jackfield"),
        (f"/tmp/{'x' * 300}", "File name too long"),
        ("/tmp/line\nend/../\x1b[31m/\0".partition("\0")[0] * 400, "File name too long"),
    ],
)
def test_caches_that_cannot_be(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", name)
    assert told in failure(cache)


def test_without_a_home(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert "there is no home folder" in failure(cache)


def test_a_full_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "(No space left on device)" in failure(cache)
    assert not any((cache.home / "jackfield").iterdir())
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("kill -9 $$",), "cannot compile its kernel (no message)"),
        (("exit 0",), "cannot compile its kernel (no message)"),
        (('echo garbage > "$2"',), "does not load"),
        (('cp /bin/sh "$2"',), "does not load"),
        ((r"printf 'error \033[31m\000\377\r\007%s' $(seq 1 9999) >&2", "exit 1"), r"\x1b[31m"),
        (("printf '\\n\\n' >&2; exit 3",), "no message"),
        (
            (
                "echo 'kernel.cpp: note' >&2",
                "echo '/usr/bin/ld: final link failed: No space left on device' >&2",
                "echo 'collect2: error: ld returned 1 exit status' >&2",
                "exit 1",
            ),
            "final link failed: No space left on device",
        ),
        (("echo 'collect2: error: ld returned 1 exit status' >&2", "exit 1"), "collect2: error"),
    ],
)
def test_compilers_that_are_none(cache: Cache, lines: tuple[str, ...], told: str) -> None:
    cache.write_compiler(*lines)
    message = failure(cache)
    assert told in message
    assert len(message) < 1000
    assert not any((cache.home / "jackfield").iterdir())


@pytest.mark.parametrize("named", ["'", '"g++', "\\", 'g++ "-O1'])
def test_a_compiler_that_is_half_a_quotation(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("CXX", named)
    assert f"(CXX={named} is not one)" in failure(cache)


def test_what_nobody_reads_goes_when_another_is_kept(tmp_path: Path) -> None:
    folder = keeping.own_folder(tmp_path / "own")
    ages = {"old.json": 91, "read.json": 91, "young.json": 89, "old.so": 91}
    for name in ages:
        keeping.keep(folder / name, b"x")
    for name, days in ages.items():
        then = time.time() - days * 24 * 3600
        os.utime(folder / name, (then, then))
    assert keeping.kept(folder / "read.json") == b"x"
    keeping.keep(folder / "new.json", b"x")
    assert {path.name for path in folder.iterdir()} == {
        "read.json", "young.json", "old.so", "new.json",
    }  # fmt: skip


def test_what_killed_processes_had_begun_goes_as_well(tmp_path: Path) -> None:
    folder = keeping.own_folder(tmp_path / "own")
    for name, hours in (
        ("compiling-a", 25),
        ("compiling-b", 1),
        ("writing-a", 25),
        ("writing-b", 1),
    ):
        begun = folder / name
        begun.mkdir() if name.startswith("c") else begun.touch()
        then = time.time() - hours * 3600
        os.utime(begun, (then, then))
    keeping.keep(folder / "new.so", b"x")
    assert {path.name for path in folder.iterdir()} == {"compiling-b", "writing-b", "new.so"}


def test_nothing_is_compiled_for_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else might do, in an error, and what it would take, in an estimate."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(compiling, "_made", lambda *_: pytest.fail("it compiles a kernel"))
    given = {"attn_implementation": "sdpa", "cache_implementation": "dynamic"}
    with pytest.raises(PlanError, match=r"reads quantized checkpoints.*; use .*int8-cpu"):
        jackfield.plan("demo", quantization="gguf", **given)
    weights = jackfield.estimate("demo", **given).weights
    (found,) = (row for row in weights if row.registered.name == "int8-cpu")
    assert not found.reasons
