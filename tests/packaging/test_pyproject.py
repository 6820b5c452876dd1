"""pyproject.toml against the tree, the installation and the constraints files."""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jackfield.registry.discovery import discover

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY_POINTS: dict[str, str] = PROJECT["entry-points"]["jackfield"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def pins(name: str) -> dict[str, Version]:
    """The constraints file's exact versions by canonical name, for this machine."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    found: dict[str, Version] = {}
    for requirement in map(Requirement, filter(None, lines)):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert requirement.url is None, requirement
        if requirement.marker is None or requirement.marker.evaluate():
            assert canonicalize_name(requirement.name) not in found, requirement
            found[canonicalize_name(requirement.name)] = Version(specifier.version)
    return found


def ranges(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    requirements = map(Requirement, lines)
    return [requirement for requirement in requirements if requirement.name != "jackfield"]


def test_entry_points_are_sorted() -> None:
    assert list(ENTRY_POINTS) == sorted(ENTRY_POINTS)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_backend_module_exists(name: str) -> None:
    path = ROOT / "plugins" / ENTRY_POINTS[name].replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_point_is_named_after_its_module(name: str) -> None:
    package, kind, backend = ENTRY_POINTS[name].split(".")
    assert (package, name) == ("jackfield_plugins", f"{kind}-{backend.replace('_', '-')}")


def test_own_names_are_those_of_the_entry_points() -> None:
    """So they are known also where one was left out, and nobody else gets them."""
    own = distribution("jackfield").entry_points.select(group="jackfield")
    names = {p.entry_point: p.backends for p in discover(own, {}).plugins}
    for entry_point, backends in names.items():
        assert [canonicalize_name(b.replace(":", "-", 1)) for b in backends] == [entry_point]


def test_installed_metadata_is_fresh() -> None:
    installed = distribution("jackfield").entry_points.select(group="jackfield")
    found = {entry_point.name: entry_point.value for entry_point in installed}
    assert found == ENTRY_POINTS, "pyproject.toml has changed: run `pip install -e .` again"


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_constraints_satisfy_every_range(name: str) -> None:
    extras = ["accelerate", "structured", "test"] if "oldest" in name else list(EXTRAS)
    versions = pins(name)
    missing = {r.name for r in ranges(*extras) if canonicalize_name(r.name) not in versions}
    assert not missing
    wrong = [
        str(r) for r in ranges(*extras) if versions[canonicalize_name(r.name)] not in r.specifier
    ]
    assert not wrong


def test_oldest_is_the_lower_bound() -> None:
    oldest = pins("constraints-oldest.txt")
    for requirement in ranges():
        (lowest,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
        pinned = oldest[canonicalize_name(requirement.name)]
        # The one exception is explained in the file.
        assert pinned.release[:2] == lowest.release[:2] or requirement.name == "torch"
