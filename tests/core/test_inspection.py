"""The doctor, with real metadata in made-up sites: each illness is found, health is left alone."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jackfield import __version__
from jackfield.registry import inspection, installed, machine
from jackfield.registry.backends import PluginRecord, Registry
from jackfield.registry.findings import Finding

if TYPE_CHECKING:
    from conftest import Site


def of(findings: Any, subject: str) -> Finding:
    """The one finding about `subject`."""
    (only,) = [finding for finding in findings if finding.subject == subject]
    return only


def plugin(**changes: Any) -> Finding:
    fields = {"entry_point": "x", "module": "m", "distribution": "d", "version": "1"}
    record = PluginRecord(**{**fields, "state": "loaded", "backends": ("cache:c",), **changes})
    return of(inspection.plugins(Registry(plugins=[record])), "x of d 1")


def test_plugins_of_every_state() -> None:
    assert (plugin().state, plugin().message) == ("ok", "offers cache:c")
    failed = plugin(state="failed", cause="it hangs")
    assert (failed.state, failed.message) == ("problem", "failed: it hangs")
    assert "JACKFIELD_DISABLE=x" in str(failed.advice)
    disabled = plugin(state="disabled", cause="in JACKFIELD_DISABLE")
    assert (disabled.state, disabled.message) == ("warning", "disabled: in JACKFIELD_DISABLE")
    claimed = plugin(problems=("cache 'c' is also claimed by e 2 (y)",))
    assert claimed.state == "warning"
    assert "JACKFIELD_DISABLE=x" in str(claimed.advice)


def test_no_plugins_is_a_problem() -> None:
    assert of(inspection.plugins(Registry()), "jackfield").state == "problem"


def test_every_finding_has_advice_where_there_is_something_to_do() -> None:
    for finding in inspection.examine():
        assert finding.area
        assert finding.state == "ok" or finding.advice, finding
        assert finding.to_dict()["subject"] == finding.subject


def test_an_entry_point_whose_module_is_gone(site: Site) -> None:
    site.add("stale", "", entry_points={"old": "outside_gone"})
    finding = of(inspection.plugins(site.look()), "old of stale 1.5")
    assert finding.state == "problem"
    assert "outside_gone" in finding.message


REQUIRES = (
    "torch>=2,<3",
    "transformers>=5",
    "absent>=1.5",
    "windows-only ; python_version < '3'",
    "kernels>=0.17 ; extra == 'hub'",
    "pytest>=8 ; extra == 'test'",
    "mypy>=1 ; extra == 'lint'",
    "nowhere>=1 ; extra == 'hub'",
)


def installation(folder: Path, **versions: str) -> dict[str, Distribution]:
    """A jackfield that requires `REQUIRES`, and other distributions."""
    found = {}
    extras = [f"Provides-Extra: {extra}" for extra in ("hub", "lint", "test")]
    headers = [*extras, "Requires-Python: >=3.11", *(f"Requires-Dist: {r}" for r in REQUIRES)]
    for name, version in {"jackfield": "0.1", **versions}.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += headers if name == "jackfield" else []
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        found[name] = Distribution.at(info)
    return found


def test_libraries_are_held_against_the_metadata(tmp_path: Path) -> None:
    versions = {"torch": "2.9+cpu", "transformers": "4.1", "kernels": "0.1", "pytest": "7"}
    found = list(installed.libraries(installation(tmp_path, **versions, mypy="2.0", numpy="1.0")))
    assert {f.subject: f.state for f in found} == {
        "jackfield": "ok",
        "python": "ok",
        "absent": "problem",
        "torch": "ok",
        "transformers": "problem",
        "kernels": "warning",
        "numpy": "ok",
        "pytest": "warning",
    }
    assert of(found, "absent").advice == "run `pip install 'absent>=1.5'`"
    assert of(found, "transformers").message == "4.1 (supported: >=5)"
    assert of(found, "transformers").advice == "run `pip install 'transformers>=5'`"


def test_jackfield_without_metadata_is_a_problem() -> None:
    (finding,) = installed.libraries({})
    assert finding.state == "problem"
    assert finding.advice == "run `pip install -e .` in its source tree"


def test_the_ranges_are_those_of_the_installed_metadata() -> None:
    here = {dist.metadata["Name"]: dist for dist in distributions()}
    found = list(installed.libraries(here))
    assert of(found, "jackfield").message == __version__
    assert "supported: " in of(found, "transformers").message


def test_found_twice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("twin", "", version="1.0")
    other = site.beside("other")
    other.add("Twin", "", version="2.0")
    site.add("outsider", "")
    other.add("outsider", "", version="9")
    paths = [str(site.folder), str(other.folder)]
    finding = of(installed.stale(distributions(path=paths), {"TWIN"}), "twin")
    assert finding.state == "problem"
    assert f"1.0 in {site.folder}" in finding.message
    assert f"2.0 in {other.folder}" in finding.message
    (other.folder / "Twin-2.0.dist-info/METADATA").write_text("Name: twin\nVersion: 1.0\n")
    assert of(installed.stale(distributions(path=paths), {"twin"}), "twin").state == "warning"
    assert list(installed.stale(distributions(path=[*paths[:1], *paths[:1]]), {"twin"})) == []


def test_two_versions_in_one_folder(site: Site) -> None:
    site.add("twin", "", version="1.0")
    site.add("twin", "", version="2.0")
    assert of(installed.stale(distributions(path=[str(site.folder)]), {"twin"}), "twin").state == (
        "problem"
    )


def test_folders_without_metadata_are_survived(site: Site) -> None:
    (site.folder / "half-1.0.dist-info").mkdir()
    (site.folder / "latin-1.0.dist-info").mkdir()
    (site.folder / "latin-1.0.dist-info/METADATA").write_bytes(b"Name: \xff\n")
    info = site.add("whole", "")
    (info / "direct_url.json").write_text("{")
    assert list(installed.stale(distributions(path=[str(site.folder)]), {"whole"})) == []


@pytest.mark.parametrize("content", ["[]", "1", '{"dir_info": 1}', '{"dir_info": {"editable": 1}}',
                                     '{"dir_info": {"editable": 1}, "url": 5}', "{"])  # fmt: skip
def test_a_direct_url_that_says_nothing_is_survived(site: Site, content: str) -> None:
    (site.add("odd", "") / "direct_url.json").write_text(content)
    assert list(installed.stale(distributions(path=[str(site.folder)]), {"odd"})) == []


@pytest.mark.parametrize("headers", ["", "Name: numpy", "Version: 1", "Name: numpy\nVersion: odd",
                                     "Name:\nVersion:", "Name: numpy\nVersion:"])  # fmt: skip
@pytest.mark.one_in(4)
def test_any_metadata_is_survived(site: Site, headers: str) -> None:
    """Which headers are there, and what their absence does, differs between Pythons."""
    (site.add("numpy", "") / "METADATA").write_text(headers + "\n")
    assert all(isinstance(finding, Finding) for finding in inspection.examine())


PROJECT = """
[project]
name = "mine"
version = "VERSION"
[project.entry-points.jackfield]
"""


@pytest.mark.parametrize(
    ("version", "entry_points", "message"),
    [
        ("1.5", 'mine-ep = "outside_mine"', "editable, the same as its source tree"),
        ("1.6", 'mine-ep = "outside_mine"', "1.5 is installed, its source tree says 1.6"),
        ("1.5", 'mine-ep = "outside_mine"\nnew = "m"', "that are not installed: new"),
        ("1.5", "", "are gone from its source tree: mine-ep"),
        ("1.5", 'mine-ep = "elsewhere"', "name another module in its source tree: mine-ep"),
    ],
)
def test_editable_against_its_source_tree(
    site: Site, tmp_path: Path, version: str, entry_points: str, message: str
) -> None:
    tree = tmp_path / "source tree"
    tree.mkdir()
    (tree / "pyproject.toml").write_text(PROJECT.replace("VERSION", version) + entry_points)
    info = site.add("mine", "")
    link = {"dir_info": {"editable": True}, "url": tree.as_uri()}
    (info / "direct_url.json").write_text(json.dumps(link))
    (finding,) = installed.stale(distributions(path=[str(site.folder)]), {"mine"})
    assert message in finding.message
    assert finding.state == ("ok" if "same" in message else "problem")
    assert finding.state == "ok" or finding.advice == f"run `pip install -e {tree}` again"
    shutil.rmtree(tree)
    (finding,) = installed.stale(distributions(path=[str(site.folder)]), {"mine"})
    assert (finding.state, "cannot be read" in finding.message) == ("problem", True)


def test_variables() -> None:
    environ = {"JACKFIELD_PLUGINS": "a", "JACKFIELD_PLUGIN": "b", "HOME": "/"}
    warnings = ["JACKFIELD_PLUGINS names 'a', which is not installed", "the metadata is gone"]
    plugins, typo, named, other = sorted(
        inspection.variables(environ, warnings), key=lambda f: (f.state, f.message)
    )
    assert (plugins.subject, plugins.message) == ("JACKFIELD_PLUGINS", "is set to 'a'")
    assert (typo.subject, typo.state) == ("JACKFIELD_PLUGIN", "warning")
    assert "did you mean 'JACKFIELD_PLUGINS'" in typo.message
    assert (named.subject, named.message) == (
        "JACKFIELD_PLUGINS",
        "names 'a', which is not installed",
    )
    assert other.message == "the metadata is gone"


def test_devices() -> None:
    assert "threads" in of(machine.devices(), "cpu").message


@pytest.mark.parametrize("error", [ImportError("no torch"), OSError("libfoo.so is missing")])
def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "torch":
            raise error
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    (finding,) = machine.devices()
    assert finding.state == "problem"
    assert str(error) in finding.message


def test_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    assert of(machine.compilers({}, gpu=False), "C++").message == sys.executable
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert of(machine.compilers({}, gpu=False), "C++").state == "warning"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "g++" in str(of(machine.compilers({}, gpu=False), "C++").advice)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert of(machine.compilers({}, gpu=False), "Python.h").state == "warning"


def test_triton_is_missed_on_a_gpu_only(tmp_path: Path) -> None:
    assert not [f for f in machine.compilers({}, gpu=False) if f.subject == "triton"]
    assert of(machine.compilers({}, gpu=True), "triton").state == "warning"
    installed = installation(tmp_path, triton="3.5")
    assert of(machine.compilers(installed, gpu=True), "triton").message == "3.5"
