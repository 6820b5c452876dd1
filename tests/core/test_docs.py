"""The documentation says what is true: its Python runs, and every hook and contract is in it."""

from __future__ import annotations

import inspect
import re
import runpy
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import jackfield
from jackfield import contracts, errors
from jackfield.cli.app import app
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
        "docs/first-steps.md",
        "docs/kernels.md",
        "docs/memory.md",
        "docs/placement.md",
        "docs/structured.md",
        "docs/tracing.md",
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


def told_commands() -> list[str]:
    """Every `jackfield …` of the pages that can be typed, in a block or within a sentence."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found: set[str] = set()
    for page in pages:
        text = page.read_text()
        found |= set(re.findall(r"`(jackfield [^`\n]+)`", text))
        for block in re.findall(r"```(?:console|bash|sh|text|)\n(.*?)```", text, re.DOTALL):
            joined = block.replace("\\\n", " ")
            found |= set(re.findall(r"^(?:\$ )?(jackfield .+)$", joined, re.MULTILINE))
    return sorted(one for one in found if not re.search(r"[…\[{]|\.\.\.", one))


@pytest.mark.parametrize("told", told_commands())
def test_commands_of_the_docs_can_be_typed(told: str) -> None:
    command: Any = typer.main.get_command(app)
    typed = re.split(r" (?:[|&]{1,2}|2?>|<) ", told)[0]
    words = shlex.split(typed, comments=True)[1:]
    if "COMMAND" in words:
        return
    while words and (inner := getattr(command, "commands", {}).get(words[0])) is not None:
        command, words = inner, words[1:]
    if "run" in getattr(command, "commands", ()):
        command = command.commands["run"]
    allowed = {"Exit", "MissingParameter"}
    allowed |= {"BadOptionUsage"} if len(words) == 1 else set()  # an option is only named
    allowed |= {"BadParameter"} if re.search(r"\b[A-Z]+\b", typed) else set()  # to be replaced
    complaint = complaint_of(command, words)
    assert not complaint or complaint & allowed, told


def complaint_of(command: Any, words: list[str]) -> set[str]:
    """The kinds of the error of words that a command does not take; none: it takes them."""
    try:
        command.make_context("jackfield", words)
    except Exception as error:  # noqa: BLE001 - click's kinds, which typer keeps to itself
        return {kind.__name__ for kind in type(error).__mro__}
    return set()


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


def test_the_snippets_on_the_first_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in files of their own, which the page takes in."""
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    files = sorted((ROOT / "docs/snippets").glob("*.py"))
    page = (ROOT / "docs/index.md").read_text()
    assert files
    try:
        for file in files:
            assert str(file.relative_to(ROOT)) in page
            code = file.read_text().replace("path/to/model", str(MODEL_PATH))
            exec(compile(code, str(file), "exec"), {})  # noqa: S102 - our own pages
    finally:
        jackfield.uninstall()


def test_what_pages_take_in_is_there() -> None:
    """A formatter took such a line for Python, and the page showed it in place of the code."""
    for page in (ROOT / "docs").glob("*.md"):
        for line in re.findall(r"^.*-- *8 *<.*$", page.read_text(), re.MULTILINE):
            named = re.fullmatch(r' *--8<-- "([^":]+)(?::(\w+))?"', line)
            assert named, f"{page.name}: {line}"
            text = (ROOT / named[1]).read_text()
            assert named[2] is None or f"--8<-- [start:{named[2]}]" in text


def test_the_page_of_options_is_of_this_code() -> None:
    made = runpy.run_path(str(ROOT / "tools/options_page.py"))["page"]()
    assert (ROOT / "docs/options.md").read_text() == made, "run tools/options_page.py"


def test_every_public_name_is_documented() -> None:
    """What `jackfield` offers, and every class and field of the contracts."""
    api = (ROOT / "docs/api.md").read_text()
    told = {name for row in re.findall(r"members: \[(.*?)\]", api) for name in row.split(", ")}
    assert {n for n in jackfield.__all__ if n not in told} == {"hookimpl"}
    assert "::: jackfield.hookspecs" in api
    assert {n for n in errors.__all__ if n.endswith("Error")} - told == set()
    pages = (ROOT / "docs/contracts.md").read_text()
    given = {name for row in re.findall(r"members: \[(.*?)\]", pages) for name in row.split(", ")}
    given |= set(re.findall(r"^::: .*\.([A-Z]\w+)$", pages, re.MULTILINE))
    classes = {n for n in contracts.__all__ if isinstance(getattr(contracts, n), type)}
    assert classes - given == set()


def test_every_field_of_a_contract_is_documented() -> None:
    """Fields stand in the class's docstring, which the pages are made of."""
    missing = []
    for name in contracts.__all__:
        cls = getattr(contracts, name)
        if isinstance(cls, type) and is_dataclass(cls):
            text = "".join(inspect.getdoc(c) or "" for c in cls.__mro__)
            missing += [f"{name}.{f.name}" for f in fields(cls) if f"{f.name}" not in text]
    assert missing == []
