"""What installed code consists of, for a lock: hashes of packages, versions of libraries."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from jackfield.errors import PlanError, quoted

ABSENT = "not there"  # in the place of a version
#: What every model runs on.
LIBRARIES = ("jackfield", "safetensors", "tokenizers", "torch", "transformers")


@functools.cache
def content_of(module: str) -> str:
    """The SHA-256 of all files of the package that `module` is in, but for bytecode.

    Of names within the package and contents, so an installation may be anywhere. Raises PlanError
    where it has no files, or one that cannot be read.
    """
    whole = hashlib.sha256()
    for name, path in sorted(_files_of(module)):
        try:
            content = hashlib.sha256(path.read_bytes()).digest()
        except OSError as error:
            raise PlanError(
                f"cannot lock {module}: {path} cannot be read: {error.strerror}; make it readable"
            ) from None
        whole.update(name.encode() + b"\0" + content)
    return f"sha256:{whole.hexdigest()}"


def _files_of(module: str) -> list[tuple[str, Path]]:
    """The files of the package that `module` is in, with their names in it."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without one: somebody made it by hand
        spec = None
    found: list[tuple[str, Path]] = []
    if spec is not None and spec.submodule_search_locations:
        for folder in map(Path, spec.submodule_search_locations):
            inside = ((path.relative_to(folder), path) for path in folder.rglob("*"))
            found += [
                (name.as_posix(), path)
                for name, path in inside
                if "__pycache__" not in name.parts and path.is_file()
            ]
    elif spec is not None and spec.origin and (path := Path(spec.origin)).is_file():
        found = [(path.name, path)]
    if not found:
        where = "nowhere" if spec is None else spec.origin or spec.submodule_search_locations
        raise PlanError(
            f"cannot lock {module}: the files of {top} are not to be found (its origin: {where}); "
            "install it as files"
        )
    return found


def versions_of(distributions: set[str]) -> dict[str, str]:
    """The versions of `LIBRARIES`, and of what the distributions name as their requirements."""
    names = {*LIBRARIES, *(name for one in distributions for name in _required(one))} - {"python"}
    return {"python": platform.python_version()} | {name: _version(name) for name in sorted(names)}


def _required(distribution: str) -> Iterator[str]:
    """Raises PlanError where nobody can say what it requires."""
    try:
        texts = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise PlanError(
            f"cannot lock {distribution}: it has no metadata here, which would say what it "
            f"requires; install it with `pip install {distribution}`"
        ) from None
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise PlanError(
                f"cannot lock {distribution}: its metadata has a requirement that cannot be read: "
                f"{quoted(text)}; install a version whose metadata is right"
            ) from None
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
