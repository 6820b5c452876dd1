"""Whether the distributions that are installed fit jackfield, and whether their metadata is true.

Versions are read from installed metadata, the ranges from jackfield's own.
"""

from __future__ import annotations

import json
import os
import platform
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from jackfield.registry.discovery import GROUP
from jackfield.registry.findings import Finding, State
from jackfield.registry.loading import DISTRIBUTION

#: Worth knowing the version of, when something is wrong, though not every plugin needs them.
NOTABLE = (
    "accelerate", "bitsandbytes", "gptqmodel", "huggingface-hub", "kernels", "numpy", "torchao",
)  # fmt: skip


def first_on_path(installed: Iterable[Distribution]) -> dict[str, Distribution]:
    """Canonical name -> the distribution that an import would use: the first one on the path."""
    found: dict[str, Distribution] = {}
    for dist in installed:
        if name := _name(dist):
            found.setdefault(name, dist)
    return found


def _name(dist: Distribution) -> str | None:
    """None for a folder that an interrupted installation left without readable metadata."""
    try:
        headers = dist.metadata
        if "Name" not in headers or "Version" not in headers:  # [] differs between Pythons then
            return None
        return canonicalize_name(headers["Name"]) or None
    except (OSError, TypeError, ValueError):  # TypeError: there are no headers at all
        return None


def libraries(installed: Mapping[str, Distribution]) -> Iterator[Finding]:
    """Installed versions against the ranges in jackfield's metadata."""
    own = installed.get(DISTRIBUTION)
    if own is None:
        yield Finding(
            "libraries", DISTRIBUTION, "problem", "is imported but not installed, so it has no "
            "plugins and no ranges to check", "run `pip install -e .` in its source tree",
        )  # fmt: skip
        return
    yield Finding("libraries", DISTRIBUTION, "ok", own.version)
    wanted = SpecifierSet(own.metadata["Requires-Python"] or "")
    yield _in_range("python", platform.python_version(), wanted, extra=False)
    needed, optional = _requirements(own)
    for name, specifier in sorted(needed.items()):
        yield _library(name, installed.get(name), specifier)
    for name in sorted({*optional, *NOTABLE} - set(needed)):
        if (dist := installed.get(name)) is not None:
            specifier = optional.get(name, SpecifierSet())
            finding = _in_range(name, dist.version, specifier, extra=True)
            if name in NOTABLE or finding.state != "ok":
                yield finding


def _requirements(own: Distribution) -> tuple[dict[str, SpecifierSet], dict[str, SpecifierSet]]:
    """What is required here, and what the extras add: canonical name -> versions."""
    needed: dict[str, SpecifierSet] = {}
    optional: dict[str, SpecifierSet] = {}
    extras = own.metadata.get_all("Provides-Extra") or []
    for text in own.requires or ():
        requirement = Requirement(text)
        name, marker = canonicalize_name(requirement.name), requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            needed[name] = needed.get(name, SpecifierSet()) & requirement.specifier
        elif any(marker.evaluate({"extra": extra}) for extra in extras):
            optional[name] = optional.get(name, SpecifierSet()) & requirement.specifier
    return needed, optional


def _library(name: str, dist: Distribution | None, specifier: SpecifierSet) -> Finding:
    if dist is None:
        advice = f"run `{_install(name, specifier)}`"
        return Finding("libraries", name, "problem", "is not installed", advice)
    return _in_range(name, dist.version, specifier, extra=False)


def _in_range(name: str, version: str, wanted: SpecifierSet, *, extra: bool) -> Finding:
    shown = f"{version} (supported: {wanted})" if wanted else version
    if _within(version, wanted):
        return Finding("libraries", name, "ok", shown)
    advice = (
        f"run jackfield with python {wanted}"
        if name == "python"
        else f"run `{_install(name, wanted)}`"
    )
    return Finding("libraries", name, "warning" if extra else "problem", shown, advice)


def _within(version: str, wanted: SpecifierSet) -> bool:
    """Also of what is no version: packaging up to 25 raises there."""
    try:
        return wanted.contains(version, prereleases=True)
    except InvalidVersion:
        return not wanted


def _install(name: str, wanted: SpecifierSet) -> str:
    return f"pip install '{name}{wanted}'" if wanted else f"pip install {name}"


def stale(installed: Iterable[Distribution], offering: set[str]) -> Iterator[Finding]:
    """Metadata that does not tell the truth: found twice, or older than an editable source tree.

    Looks at jackfield, at what it requires, and at the distributions that offer plugins.
    """
    installed = list(installed)
    first = first_on_path(installed)
    own = {DISTRIBUTION, *map(canonicalize_name, offering)}
    needed = _requirements(first[DISTRIBUTION])[0] if DISTRIBUTION in first else {}
    for name in sorted({*own, *needed} & set(first)):
        places = {(_place(d), d.version): None for d in installed if _name(d) == name}
        if len(places) > 1:
            yield _twice(name, list(places))
    for name in sorted(own & set(first)):
        yield from _editable(name, first[name])


def _place(dist: Distribution) -> str:
    return os.path.realpath(str(dist.locate_file("")))


def _twice(name: str, places: list[tuple[str, str]]) -> Finding:
    message = "is installed more than once: " + ", ".join(f"{v} in {path}" for path, v in places)
    state: State = "problem" if len({version for _, version in places}) > 1 else "warning"
    advice = f"run `pip uninstall {name}` until it is gone, then install it once"
    return Finding("installation", name, state, message, advice)


def _editable(name: str, dist: Distribution) -> Iterator[Finding]:
    """Compare an editable installation with the pyproject.toml of its source tree."""
    tree = _source_tree(dist)
    if tree is None:
        return
    advice = f"run `pip install -e {tree}` again"
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, ValueError) as error:
        message = f"is editable, but {tree / 'pyproject.toml'} cannot be read: {error}"
        yield Finding("installation", name, "problem", message, advice)
        return
    differences = list(_differences(dist, project))
    for message in differences:
        yield Finding("installation", name, "problem", message, advice)
    if not differences:
        yield Finding("installation", name, "ok", f"editable, the same as its source tree {tree}")


def _source_tree(dist: Distribution) -> Path | None:
    try:
        data = json.loads(dist.read_text("direct_url.json") or "{}")
        if not data.get("dir_info", {}).get("editable"):
            return None
        return Path(url2pathname(urlsplit(data["url"]).path))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _differences(dist: Distribution, project: Mapping[str, Any]) -> Iterator[str]:
    version = project.get("version", dist.version)  # a dynamic version cannot be compared
    if version != dist.version:
        yield f"{dist.version} is installed, its source tree says {version}"
    written = project.get("entry-points", {}).get(GROUP, {})
    known = {e.name: e.value for e in dist.entry_points if e.group == GROUP}
    if missing := sorted(set(written) - set(known)):
        yield f"its source tree has entry points that are not installed: {', '.join(missing)}"
    if gone := sorted(set(known) - set(written)):
        yield f"installed entry points are gone from its source tree: {', '.join(gone)}"
    if moved := sorted(n for n in known if written.get(n, known[n]) != known[n]):
        yield f"installed entry points name another module in its source tree: {', '.join(moved)}"
