"""From a kind and a name to a folder with a package that installs and passes its checks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from jackfield.errors import JackfieldError, UsageError, first_line, quoted, shown
from jackfield.hookspecs import HOOKS
from jackfield.planning.solving import ARGUMENTS
from jackfield.registry.discovery import registry
from jackfield.spelling import AUTO, nearest

TEMPLATE = Path(__file__).with_name("template")

#: Lower-case words, the first of which begins with a letter: classes are named after it.
NAME = re.compile(r"[a-z][a-z0-9]*(?:[._-][a-z0-9]+)*")
LONGEST = 40

#: The kinds that have a variant in Triton, and the layouts that a cache can have.
TRITON = ("attention", "kernel")
LAYOUTS = ("packed", "padded")

#: kind -> the flag of the command line that selects a backend
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "--attn-implementation",
        "cache": "--cache",
        "compiler": "--compile",
        "decoding": "--decoding",
        "kernel": "--kernel",
        "quantizer": "--quantization",
        "scheduler": "--scheduler",
    }
)


@dataclass(frozen=True)
class Package:
    """A package that was written.

    Attributes:
        folder: Where it is.
        distribution: What `pip` calls it.
        module: What Python imports.
        files: All of it, below `folder`, sorted.
    """

    folder: Path
    distribution: str
    module: str
    files: tuple[Path, ...]


def write_package(
    kind: str,
    name: str,
    folder: Path | None = None,
    *,
    triton: bool = False,
    layout: str | None = None,
) -> Package:
    """Write the package of a backend called `name`, whole or not at all.

    Args:
        kind: One of `HOOKS`.
        name: The backend's; the distribution is ``jackfield-NAME``.
        folder: A new or empty one; None: that name, in the working folder.
        triton: With a kernel in Triton and its reference in torch beside it.
        layout: "packed" (None means it) or "padded", of a cache.

    Raises:
        UsageError: The kind, the name or the folder will not do, or copier is not installed.
    """
    _check_kind(kind, triton, layout)
    _check_name(kind, name)
    distribution = "jackfield-" + re.sub(r"[._]", "-", name)
    module = distribution.replace("-", "_")
    _check_free(kind, name, distribution, module)
    folder = Path(distribution) if folder is None else folder
    _check_folder(folder)
    answers = {
        "kind": kind,
        "name": name,
        "triton": triton,
        "layout": layout or LAYOUTS[0],
        "jackfield": _compatible(importlib.metadata.version("jackfield")),
        "argument": ARGUMENTS[kind],
        "flag": FLAGS[kind],
    }
    _write(answers, folder)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return Package(folder, distribution, module, tuple(files))


def _check_kind(kind: str, triton: bool, layout: str | None) -> None:
    if kind not in HOOKS:
        kinds = ", ".join(sorted(HOOKS))
        raise UsageError(f"there is no kind {quoted(kind)}{nearest(kind, HOOKS)}; kinds: {kinds}")
    if triton and kind not in TRITON:
        raise UsageError(f"--triton is for {' and '.join(TRITON)}, not for a {kind}; leave it out")
    if layout is not None and kind != "cache":
        raise UsageError("--layout is for a cache; leave it out")
    if layout not in (None, *LAYOUTS):
        raise UsageError(f"a cache is {' or '.join(LAYOUTS)}, not {quoted(layout)}")


def _check_name(kind: str, name: str) -> None:
    if name.startswith("jackfield-"):
        raise UsageError(
            f"NAME is the backend's, and its package is called jackfield-NAME; leave 'jackfield-' "
            f"out: jackfield new {kind} {name.removeprefix('jackfield-') or 'NAME'}"
        )
    if name == AUTO:
        raise UsageError(f"{AUTO!r} leaves the choice to jackfield; take another name")
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{quoted(name)} cannot be the name of a backend: it must be lower-case words joined "
            "by '-', '_' or '.', the first of which begins with a letter"
        )
    if len(name) > LONGEST:
        raise UsageError(f"a name of {len(name)} characters is too long; take {LONGEST} at most")


def _check_free(kind: str, name: str, distribution: str, module: str) -> None:
    for there in registry().of_kind(kind):
        if there.name == name:
            raise UsageError(f"{there} has that name already; take another one")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise UsageError(f"{distribution} {version} is installed already; take another name")
    if importlib.util.find_spec(module) is not None:
        raise UsageError(
            f"the module of {name!r} would be {module}, and one is installed; take another name"
        )


def _check_folder(folder: Path) -> None:
    try:
        if folder.is_symlink() or folder.exists():
            if not folder.is_dir():
                raise UsageError(f"{folder} is there and is no folder; name another with --folder")
            if any(folder.iterdir()):
                raise UsageError(
                    f"the folder {folder} is there and is not empty; name another with --folder"
                )
        elif not folder.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {shown(folder.absolute().parent)}; make it first")
    except OSError as error:
        raise _unwritable(folder, error) from None


def _write(answers: dict[str, Any], folder: Path) -> None:
    """In a folder within it first, then in its place: nothing half-written is ever there."""
    if importlib.util.find_spec("copier") is None:
        raise UsageError(
            "packages are written by copier, which is not installed: pip install 'jackfield[new]'"
        )
    import copier
    from copier.errors import CopierError

    new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".jackfield-new-", dir=folder) as aside:
            made = Path(aside) / "made"
            nobodys = copier.Settings()  # not what the caller has in a file of copier's
            copier.run_copy(
                str(TEMPLATE), made, answers, settings=nobodys, defaults=True, quiet=True
            )
            for part in made.iterdir():
                part.replace(folder / part.name)
    except BaseException as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(folder, error) from None
        if isinstance(error, CopierError):
            why = first_line(error)
            raise JackfieldError(f"copier could not write {folder}: {why}") from error
        raise


def _unwritable(folder: Path, error: OSError) -> UsageError:
    why = error.strerror or first_line(error)
    return UsageError(
        f"the folder {shown(folder)} cannot be written: {why}; name another with --folder"
    )


def _compatible(version: str) -> str:
    """The versions that promise the same contracts: up to the next minor one while it is 0.x."""
    own = Version(version)
    if own.major:
        return f">={own.major}.{own.minor},<{own.major + 1}"
    return f">=0.{own.minor},<0.{own.minor + 1}"
