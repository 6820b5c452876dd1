"""The documentation says what is true: its Python runs, and every hook and contract is in it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import jackfield
from jackfield.contracts import FEATURES, Backend, KVCache, Search, Strategy, TransformersCache
from jackfield.demo import MODEL_PATH
from jackfield.hookspecs import HOOKS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/batching.md",
        "docs/beam.md",
        "docs/caches.md",
        "docs/coming-from-transformers.md",
        "docs/decoding.md",
        "docs/kernels.md",
        "docs/memory.md",
        "docs/placement.md",
        "docs/structured.md",
        "docs/tutorial.md",
    ],
)
def test_python_in_docs_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            code = block.replace("path/to/model", str(MODEL_PATH))
            exec(compile(code, page, "exec"), names)  # noqa: S102 - our own pages
    finally:
        jackfield.uninstall()


def test_every_hook_and_contract_is_documented() -> None:
    text = (ROOT / "docs/hooks.md").read_text()
    members = {n for n, m in vars(Backend).items() if inspect.isfunction(m) and n[0] != "_"}
    members |= {"name", "options", "auto_rank", "bind"}
    contracts = (KVCache, TransformersCache, Strategy, Search)
    methods = members.union(
        *(c.__abstractmethods__ for c in contracts), {"refuse", "adjust_schedule"}
    )
    wanted = {f"`{name}" for name in methods | set(FEATURES)} | {f"## {h}" for h in HOOKS.values()}
    assert {name for name in wanted if name not in text} == set()


def test_the_files_and_names_that_the_architecture_tells_of_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    core = ROOT / "core/jackfield"
    there = {str(path.relative_to(core)) for path in core.rglob("*.py")}
    names = {path.rpartition("/")[2] for path in there}
    told = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page))
    gone = {path for path in told if path not in (there if "/" in path else names)}
    assert {path for path in gone if not (ROOT / path).is_file()} == set()
    code = "".join((core / path).read_text() for path in there)
    classes = set(re.findall(r"`([A-Z]\w+)(?:\.\w+)*`", page))
    assert {name for name in classes if not re.search(rf"\b{name}\b", code)} == set()
