"""The outcomes of trials: a small file for each plugin, in the user's cache folder.

A file that is missing, damaged, of another installation or not the user's own is ignored, and where
none can be written the plugin is tried again in each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import EntryPoint
from pathlib import Path

from packaging.utils import canonicalize_name

from jackfield.contracts import private_files
from jackfield.contracts.private_files import cache_folder


@dataclass(frozen=True)
class TrialResult:
    """What a trial showed. `refused`: why the plugin must not be loaded, None where it may be.

    `writes`: it writes to file descriptor 1 while it loads. `changes`: what it changes in its
    process, as `contained` says it. `seconds` is the time that it had.
    """

    refused: str | None = None
    writes: bool = False
    seconds: float = 0.0
    changes: dict[str, list[str]] = field(default_factory=dict)


def recall(entry_point: EntryPoint, seconds: float) -> TrialResult | None:
    """What a trial of this installation showed. None: there was none, or it had less time."""
    path = path_of(entry_point)
    if path is None:
        return None
    try:
        stored = json.loads(private_files.read(path))
        if stored.pop("key") != _key(entry_point):
            return None
        if len(stored) != len(fields(TrialResult)):
            return None
        found = TrialResult(**stored)
        names = [name for part in found.changes.values() for name in part]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    kinds = (type(found.refused), type(found.writes), type(found.seconds))
    if kinds[0] not in (str, type(None)) or kinds[1:] != (bool, float):
        return None
    if not all(isinstance(name, str) for name in names):
        return None
    return None if found.refused and found.seconds < seconds else found


def remember(entry_point: EntryPoint, result: TrialResult) -> Path | None:
    """Where it was written, in one step; None where it could not be."""
    path = path_of(entry_point)
    if path is None:
        return None
    content = json.dumps({"key": _key(entry_point), **asdict(result)})
    try:
        private_files.write(path, content.encode())
    except OSError:
        return None
    return path


def path_of(entry_point: EntryPoint) -> Path | None:
    """One file for an entry point of a distribution in a place, whatever its version."""
    cache = cache_folder()
    if cache is None or not cache.is_absolute():
        return None
    dist = entry_point.dist
    name = canonicalize_name(dist.name) if dist else ""
    where = str(dist.locate_file("")) if dist else ""
    parts = (where, name, entry_point.name, sys.executable, sys.version)
    return cache / "plugins" / f"{name[:60]}-{_digest(parts)}.json"


def _key(entry_point: EntryPoint) -> str:
    """Changes with what is installed: the version, its list of files, the module named."""
    dist = entry_point.dist
    parts = [entry_point.name, entry_point.value, dist.version if dist else ""]
    info = vars(dist).get("_path") if dist else None
    files = [Path(str(info), n) for n in ("RECORD", "METADATA", "entry_points.txt")] if info else []
    for path in (*files, *_sources(entry_point.module)):
        with contextlib.suppress(OSError):
            status = path.stat()
            parts += [str(path), str(status.st_mtime_ns), str(status.st_size)]
    return _digest(parts)


def _sources(module: str) -> Iterator[Path]:
    """The files that importing `module` runs first, found without running any."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, AttributeError, ValueError):
        return
    if spec is None:
        return
    if spec.origin:
        yield Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        path = Path(folder)
        for name in rest:
            path /= name
            yield path / "__init__.py"
        yield path.with_suffix(".py")


def _digest(parts: list[str] | tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:24]
