"""What `import jackfield` gives and costs, core without the built-ins, a loop without pluggy."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
import threading
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path
from types import FrameType
from typing import Any

import extras
import pluggy
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import jackfield

ROOT = Path(jackfield.__file__).parent
HEAVY = ("torch", "transformers", "numpy", "tokenizers", "safetensors")
BUILT_INS = sorted(
    entry_point.module
    for entry_point in distribution("jackfield").entry_points.select(group="jackfield")
)
CORE = sorted(
    module.name
    for module in pkgutil.walk_packages([str(ROOT)], "jackfield.")
    if not module.name.endswith(".__main__")
)


def python(script: str, *arguments: str, **environ: str) -> str:
    """What a fresh interpreter prints that runs `script`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_sorted_and_complete() -> None:
    """Every name that type checkers see is in `__all__`, and every one of it can be had."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name
        for node in [*tree.body, *typed.body]
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "jackfield")
        for alias in node.names
        if not (alias.name == "Any" or alias.name == "TYPE_CHECKING")
    }
    assert jackfield.__all__ == sorted(imported)
    for name in jackfield.__all__:
        assert getattr(jackfield, name).__module__.startswith(("jackfield", "pluggy"))
    assert set(jackfield.__all__) <= set(dir(jackfield))


def test_the_version_is_the_installed_one() -> None:
    assert jackfield.__version__ == distribution("jackfield").version
    assert "__version__" in dir(jackfield)


def test_an_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'jackfield' has no attribute 'lode'"):
        jackfield.lode  # noqa: B018


LIGHT = """
import importlib, sys
heavy, modules = sys.argv[1].split(), sys.argv[2].split()
for name in heavy:
    sys.modules[name] = None  # an import of it raises ImportError
for name in modules:
    importlib.import_module(name)
from jackfield.registry.discovery import registry
print({p.cause for p in registry().plugins})
"""


def test_no_plugin_and_no_discovery_needs_torch() -> None:
    assert BUILT_INS
    out = python(
        LIGHT, " ".join(HEAVY), " ".join(["jackfield", "jackfield.planning.selecting", *BUILT_INS])
    )
    assert out == "{None}\n"


def test_import_jackfield_brings_nothing_heavy() -> None:
    out = python(
        "import sys, jackfield; print([n for n in sys.argv[1].split() if n in sys.modules])",
        " ".join(HEAVY),
    )
    assert out == "[]\n"


ALONE = """
import importlib, sys, warnings
sys.modules["jackfield_plugins"] = None
for name in sys.argv[1].split():
    try:
        with warnings.catch_warnings():
            if name == "jackfield.replicas.on_ray":  # Ray's own modules use what others gave up
                warnings.simplefilter("ignore")
            importlib.import_module(name)
    except ModuleNotFoundError as error:  # of an extra
        if error.name not in sys.argv[2].split():
            raise
assert [n for n in sys.modules if n.startswith("jackfield_plugins")] == ["jackfield_plugins"]

import jackfield
from jackfield.registry.discovery import registry
from transformers import LlamaConfig
assert {p.state for p in registry().plugins} == {"failed"}, registry().plugins
for selections in ({}, {"attn_implementation": "sdpa"}, {"cache_implementation": "dynamic"}):
    try:
        jackfield.plan(LlamaConfig(num_hidden_layers=1), **selections)
    except jackfield.JackfieldError as error:
        print(type(error).__name__, error)
"""


def test_core_without_the_built_ins() -> None:
    """Every module of core imports, and a selection says what to install."""
    absent = [library for library in extras.EXTRAS if not extras.here(library)]
    lines = python(ALONE, " ".join(CORE), " ".join(absent)).splitlines()
    assert [line.split()[0] for line in lines] == ["PlanError", "SelectionError", "SelectionError"]
    for line in lines:
        assert "pip install jackfield" in line
        assert "jackfield doctor" in line


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


class Frames:
    """Counts the calls of Python functions by file, on every thread."""

    def __enter__(self) -> Counter[str]:
        self.files: Counter[str] = Counter()
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        return self.files

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.files[frame.f_code.co_filename] += 1

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def calls_under(files: Counter[str], folder: Path) -> int:
    return sum(count for file, count in files.items() if Path(file).is_relative_to(folder))


def test_no_pluggy_while_tokens_are_made(model: LlamaForCausalLM) -> None:
    """Not in `generate`, not in `stream`; the counter is shown to see pluggy where it does run."""
    machinery = Path(pluggy.__file__).parent
    with Frames() as files:
        manager = pluggy.PluginManager("jackfield")
        manager.add_hookspecs(sys.modules["jackfield.hookspecs"])
    assert calls_under(files, machinery) > 0
    with jackfield.load(model) as engine, Frames() as files:
        engine.generate([[1, 2], [3]], max_new_tokens=3)
        list(engine.stream([1, 2], max_new_tokens=3))
    assert calls_under(files, ROOT) > 0
    assert calls_under(files, machinery) == 0
    assert files[str(ROOT / "discovery.py")] == files[str(ROOT / "loading.py")] == 0
