"""The tutorial as its text says, in a fresh virtual environment from the wheel; for every kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fresh import ROOT, Fresh, build_wheel, fresh

from jackfield.authoring.packages import FLAGS
from jackfield.hookspecs import HOOKS

pytest.importorskip("copier", reason="needs jackfield[new]")

TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)

#: Seconds of the machine's time that a person may have to wait for, from `new` to a proven backend.
LIMIT = 60.0

pytestmark = pytest.mark.timeout(1200)  # some twenty interpreters start, on a machine that is busy


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("fresh")
    return fresh(folder, build_wheel(folder))


def told(lines: str, output: str) -> list[str]:
    """The lines that a text block promises and that did not come; … stands for anything."""
    words = " ".join(output.split())
    return [
        line
        for line in lines.splitlines()
        if not re.search(
            ".*?".join(map(re.escape, re.split(r"\s*…\s*", " ".join(line.split())))), words
        )
    ]


@pytest.mark.long
def test_the_tutorial_is_as_it_says(environment: Fresh, tmp_path: Path) -> None:
    """Line by line."""
    cwd, output, seen = tmp_path, "", []
    for language, block in BLOCK.findall(TUTORIAL):
        seen.append(language)
        if language == "text":
            assert told(block, output) == [], output
        elif language == "sh":
            output, cwd = environment.run(block, cwd)
        else:
            assert language == "python"
            (cwd / "block.py").write_text(block)
            output, _ = environment.run("python block.py; rm block.py", cwd)
            assert "there was" in output, output
    assert seen.count("sh") >= 7
    assert {"text", "python"} <= set(seen)
    verdicts = re.findall(r"(\w+)</td>", (cwd / "report.html").read_text())
    assert verdicts


def new_to_checked(environment: Fresh, folder: Path, kind: str, *more: str) -> dict[str, Any]:
    """What `jackfield check` says of a package that was written, installed and run."""
    name = "-".join([kind, *" ".join(more).replace("-", "").split()])
    before = environment.seconds
    _, cwd = environment.run(
        f"jackfield new {kind} {name} {' '.join(more)}; cd jackfield-{name}; pip install -q -e .",
        folder,
    )
    output, _ = environment.run("jackfield plugins", cwd)
    assert f"loaded {kind}:{name}" in " ".join(output.split())
    output, _ = environment.run(
        f"jackfield generate {FLAGS[kind]} plugin:{name} --max-new-tokens 8 'Once upon a time'", cwd
    )
    assert f"{kind} {name} (jackfield-{name} 0.1.0" in output
    file = cwd / "check.json"
    environment.run(
        f"jackfield check plugin:{name} --kind {kind} --json > check.json 2> log || cat log", cwd
    )
    found: dict[str, Any] = json.loads(file.read_text())
    found["machine_seconds"] = environment.seconds - before
    environment.run(f"pip uninstall -q -y jackfield-{name}", cwd)
    return found


KINDS = [(kind,) for kind in sorted(HOOKS)]
VARIANTS = [("attention", "--triton"), ("kernel", "--triton"), ("cache", "--layout padded")]


def held(found: dict[str, Any], limit: float = LIMIT) -> None:
    failed = [v for v in found["verdicts"] if v["outcome"] == "failed"]
    assert failed == []
    assert found["passed"], found["counts"]
    assert found["machine_seconds"] < limit, found["machine_seconds"]


@pytest.mark.long
def test_a_scheduler_is_written_and_proven(environment: Fresh, tmp_path: Path) -> None:
    held(new_to_checked(environment, tmp_path, "scheduler"))


@pytest.mark.long
@pytest.mark.parametrize("asked", [*KINDS, *VARIANTS], ids=" ".join)
def test_every_kind_is_written_and_proven(
    environment: Fresh, tmp_path: Path, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = LIMIT
    if "--triton" in asked:  # Python in the place of a GPU
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        limit *= 2
    held(new_to_checked(environment, tmp_path, *asked), limit)
