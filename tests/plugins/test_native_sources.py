"""C++ of backends is compiled where it runs; here it is read for every kind of processor."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import jackfield_plugins
from jackfield_plugins.native.compiling import FLAGS, SHARED, SOURCE, compiler

FOLDERS = sorted(file.parent for file in Path(jackfield_plugins.__file__).parent.rglob(SOURCE))
PROCESSORS = {
    "plain C++": "x86-64",
    "AVX2": "haswell",
    "AVX-VNNI": "alderlake",
    "AVX-512": "skylake-avx512",
    "AVX-512 VNNI": "icelake-server",
    "AVX-512 BF16": "cooperlake",
    "ARM": "armv8-a",
    "ARM with products of 8 and 16 bits": "armv8.6-a",
}
#: A compiler for ARM on another machine, as Debian calls it.
ARM = "aarch64-linux-gnu-g++"


def read(folder: Path, march: str, *more: str) -> str:
    """What the compiler complains of."""
    command, machine = compiler(), platform.machine()
    needed = "aarch64" if march.startswith("arm") else "x86_64"
    if needed == "aarch64" != machine:
        command, machine = [ARM] if shutil.which(ARM) else None, needed
    if command is None or machine != needed:
        pytest.skip(f"needs a compiler for {needed}")
    kept = [flag for flag in FLAGS if not flag.startswith("-march") and flag != "-shared"]
    done = subprocess.run(
        [*command, *kept, f"-march={march}", "-I", SHARED, *more, folder / SOURCE],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return done.stderr if done.returncode else ""


def test_there_are_sources() -> None:
    assert FOLDERS


@pytest.mark.one_in(4)
@pytest.mark.parametrize("march", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name + folder.name)
def test_every_kernel_is_valid_for_every_processor(folder: Path, march: str) -> None:
    assert read(folder, march, "-fsyntax-only") == ""


@pytest.mark.long
@pytest.mark.parametrize("march", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name + folder.name)
def test_every_kernel_becomes_code_for_every_processor(folder: Path, march: str) -> None:
    assert read(folder, march, "-O0", "-S", "-o", "/dev/null") == ""
