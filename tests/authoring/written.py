"""Packages as `jackfield new` writes them, installed by pip into a folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.build import build_wheel

from jackfield.authoring import write_package


class Variant(NamedTuple):
    """What `jackfield new` is asked for."""

    kind: str
    name: str
    more: dict[str, Any]


VARIANTS = (
    Variant("attention", "plainly", {}),
    Variant("attention", "tiled", {"triton": True}),
    Variant("cache", "pages", {}),
    Variant("cache", "rows", {"layout": "padded"}),
    Variant("compiler", "traced", {}),
    Variant("decoding", "own-past", {}),
    Variant("kernel", "norms", {}),
    Variant("kernel", "one.pass", {"triton": True}),
    Variant("quantizer", "row_wise", {}),
    Variant("scheduler", "patient", {}),
)


def write_all(folder: Path) -> list[Path]:
    """The packages of all `VARIANTS`, one folder each."""
    return [
        write_package(kind, name, folder / f"{kind}-{name}", **more).folder
        for kind, name, more in VARIANTS
    ]


def install(packages: list[Path], target: Path) -> Path:
    """Build `packages` by their build backend and unpack the wheels, as pip does, but at once."""
    for package in packages:
        with contextlib.chdir(package):  # as the standard for build backends has it
            wheel = build_wheel(str(target))
        with zipfile.ZipFile(target / wheel) as archive:
            archive.extractall(target)
    return target


def python(target: Path, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter does with that folder on its path."""
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **more)
