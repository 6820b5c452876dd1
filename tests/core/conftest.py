"""Installed distributions made up for a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jackfield.registry.backends import PluginRecord, Registry
from jackfield.registry.discovery import discover, installed
from jackfield.spelling import parse

BUILT_IN = {"attention:eager", "attention:sdpa", "cache:dynamic", "decoding:sample"}

ATTENTION = """
from dataclasses import dataclass
from jackfield import hookimpl
from jackfield.contracts import Attention, AttentionCapabilities, BoundAttention, ModelAttention

class Backend(Attention):
    name = 'NAME'
    capabilities = AttentionCapabilities()
    def bind(self, context):
        return ModelAttention("eager")
    # more

@hookimpl
def jackfield_attention():
    return [Backend()]
"""


class Site:
    """A folder of installed distributions: real metadata, on `sys.path`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def beside(self, name: str) -> Site:
        """Another site, not on the path."""
        return Site(self.folder.parent / name)

    @staticmethod
    def attention(name: str) -> str:
        """The source of a module that offers one attention."""
        return ATTENTION.replace("NAME", name)

    def add(
        self,
        distribution: str,
        source: str,
        *,
        version: str = "1.5",
        module: str | None = None,
        entry_points: Mapping[str, str] | None = None,
        requires: tuple[str, ...] = (),
    ) -> Path:
        module = module or "outside_" + distribution.lower().replace("-", "_")
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        headers = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        headers += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(headers) + "\n")
        lines = [f"{k} = {v}" for k, v in (entry_points or {f"{distribution}-ep": module}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[jackfield]", *lines]) + "\n")
        return info

    @staticmethod
    def look(**environ: str) -> Registry:
        """What discovery finds on the path now."""
        entry_points, warnings = installed()
        found = discover(entry_points, environ)
        found.warnings += warnings
        return found

    @staticmethod
    def record(found: Registry, distribution: str) -> PluginRecord:
        """The one plugin of `distribution`."""
        (only,) = (plugin for plugin in found.plugins if plugin.distribution == distribution)
        return only

    @staticmethod
    def assert_built_ins_work(found: Registry) -> None:
        own = [plugin for plugin in found.plugins if plugin.distribution == "jackfield"]
        assert {name for plugin in own for name in plugin.backends} >= BUILT_IN
        assert {plugin.state for plugin in own} == {"loaded"}
        for name in BUILT_IN:
            kind, _, backend = name.partition(":")
            assert found.find(kind, parse(f"jackfield/{backend}")).name == backend


@pytest.fixture(scope="session")
def new_site() -> type[Site]:
    """For a site that several tests share, in processes of their own."""
    return Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site in front of all others; the modules imported from it are forgotten afterwards."""
    made = Site(tmp_path / "site")
    monkeypatch.setattr("jackfield.registry.trial_results.cache_folder", lambda: tmp_path / "cache")
    # a process for each would take long; test_misbehaving_plugins has those
    monkeypatch.setattr("jackfield.registry.loading.tried", lambda *_: None)
    monkeypatch.syspath_prepend(made.folder)
    yield made
    for name in [name for name in list(sys.modules) if name.startswith("outside_")]:
        sys.modules.pop(name, None)  # one that hung may end just now, and take itself out
