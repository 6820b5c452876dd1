"""Paths, and names of classes and their attributes, in the pages for readers are in the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE, PLUGINS = ROOT / "core/jackfield", ROOT / "plugins/jackfield_plugins"

#: Classes of others.
THEIRS = {"GenerationConfig", "PreTrainedModel", "SystemExit"}


def members(node: ast.ClassDef) -> Iterator[str]:
    """What a class defines, in its body or by assigning to the first argument of a method."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from (one.id for one in targets if isinstance(one, ast.Name))
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.args.args:
            own = part.args.args[0].arg
            for one in ast.walk(part):
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                    yield from [one.attr] if ast.unparse(one.value) == own else []


def classes() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The members and the bases of each class, by its name."""
    found, bases = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for file in (file for part in (CORE, PLUGINS) for file in part.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].update(members(node))
                bases[node.name].update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
    return found, bases


MEMBERS, BASES = classes()


def has(name: str, member: str) -> bool:
    return member in MEMBERS[name] or any(
        has(base, member) for base in BASES[name] & MEMBERS.keys() - {name}
    )


def in_code(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page)


@pytest.mark.parametrize("name", ["architecture", "design"])
def test_the_paths_that_a_page_names_are_there(name: str) -> None:
    words = {
        word for code in in_code((ROOT / f"docs/{name}.md").read_text()) for word in code.split()
    }
    paths = {w for w in words if re.fullmatch(r"[a-z0-9_/-]+(/|\.(py|md|toml))", w)}
    assert len(paths) > 30
    assert {path for path in paths if not any((at / path).exists() for at in (CORE, ROOT))} == set()


@pytest.mark.parametrize("name", ["architecture", "design"])
def test_the_classes_and_attributes_that_a_page_names_are_there(name: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text()
    words = [re.match(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?", code) for code in in_code(page)]
    named = {(word[1], word[2]) for word in words if word and word[1] not in THEIRS}
    assert len(named) > 10
    wrong = {(n, m) for n, m in named if n not in MEMBERS or (m is not None and not has(n, m))}
    assert wrong == set()


def test_what_a_page_could_have_wrong_is_seen() -> None:
    assert has("PagedKVCache", "prepare")
    assert has("PagedKVCache", "native_again")  # of its base class
    assert has("StepChoice", "decided")
    assert has("Loop", "running")
    assert not has("Pool", "close")
