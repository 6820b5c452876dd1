"""What a user receives: the wheel's contents and metadata."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {"jackfield": ROOT / "core", "jackfield_plugins": ROOT / "plugins"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("jackfield-*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_sdist_has_the_templates(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.iterdir()
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    template = ROOT / "core/jackfield/authoring/template"
    files = {path.relative_to(ROOT).as_posix() for path in template.rglob("*") if path.is_file()}
    assert len(files) > 25
    assert files <= names


def dist_info(wheel: Path, name: str) -> str:
    folder = f"jackfield-{PROJECT['version']}.dist-info"
    return zipfile.ZipFile(wheel).read(f"{folder}/{name}").decode()


@pytest.mark.parametrize("package", PACKAGES)
def test_has_every_source_file(names: set[str], package: str) -> None:
    folder = PACKAGES[package]
    kinds = ("*.py", "*.cpp", "*.css", "*.h", "*.html", "*.js", "*.svg", "*.jinja", "copier.yml")
    sources = {path.relative_to(folder) for kind in kinds for path in folder.rglob(kind)}
    assert f"{package}/__init__.py" in names
    assert {source.as_posix() for source in sources} <= names


@pytest.mark.parametrize("package", PACKAGES)
def test_is_typed(names: set[str], package: str) -> None:
    assert f"{package}/py.typed" in names


def test_has_nothing_else(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, f"jackfield-{PROJECT['version']}.dist-info"}


def test_has_the_demo_model(names: set[str]) -> None:
    weights = list((ROOT / "core/jackfield/demo").rglob("*.safetensors"))
    if not weights:
        pytest.skip("the demo model is not trained yet")
    for path in (file for folder in weights for file in folder.parent.iterdir() if file.is_file()):
        assert path.relative_to(ROOT / "core").as_posix() in names


def test_entry_points(wheel: Path) -> None:
    parser = ConfigParser()
    parser.read_string(dist_info(wheel, "entry_points.txt"))
    assert dict(parser["jackfield"]) == PROJECT["entry-points"]["jackfield"]
    assert dict(parser["console_scripts"]) == PROJECT["scripts"]


def test_metadata(wheel: Path) -> None:
    metadata: Message = message_from_string(dist_info(wheel, "METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert "Apache License" in dist_info(wheel, "licenses/LICENSE")
