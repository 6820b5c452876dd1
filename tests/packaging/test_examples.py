"""The packages in docs/examples, installed by pip as a stranger's are, run and checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import extras
import pytest
from fresh import ROOT

if TYPE_CHECKING:
    from forking import Forks

EXAMPLES = sorted((ROOT / "docs/examples").glob("jackfield-*"))

pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import json
import torch
import jackfield
from jackfield_tiled_softcap import kernels, reference
PROMPTS = ["Once upon a time", "Sort these numbers: 41 7 88 23. Sort these numbers: 41 7"]

def run(**selection):
    with jackfield.load("demo", **selection) as engine:
        done = engine.generate(PROMPTS, max_new_tokens=12)
        usage = engine.statistics().cache
        return {
            "tokens": [one.token_ids for one in done],
            "report": engine.report().to_dict(),
            "planned": None not in (engine.explain(), engine.plan.memory()),
            "pages": None if usage is None else [usage.pages, usage.pages_used],
        }

query, keys = torch.randn(1, 4, 3, 12), torch.randn(2, 1, 2, 9, 12)
seen = torch.ones(3, 9, dtype=torch.bool).tril(6)[None, None]
off = [
    float((kernels.attend(*given) - reference.attend(*given)).abs().max())
    for cap in (None, 0.05)
    for given in [(query, keys[0], keys[1], seen, 0.3, cap)]
]
print(json.dumps({
    "": run(),
    "cache": run(cache_implementation="plugin:counted-pages?num_tokens=256"),
    "drafts": run(decoding="plugin:ngram-index"),
    "draft model": run(
        decoding="assisted", assistant_model="demo-draft", cache_implementation="counted-pages"
    ),
    "quantizer": run(quantization="plugin:int8-rows"),
    "kernel": run(kernels="plugin:cpp-silu"),
    "rows": run(quantization="plugin:native-rows", compile="none"),
    "native": run(quantization="plugin:native-rows", compile="native"),
    "off": off,
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    made = ("build", "*.egg-info")  # setuptools writes beside the sources
    sources = shutil.copytree(
        ROOT / "docs/examples", target / "sources", ignore=shutil.ignore_patterns(*made)
    )
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    command += [str(sources / example.name) for example in EXAMPLES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def with_examples(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), "TRITON_INTERPRET": "1"}


def ran(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=with_examples(site), capture_output=True, text=True)


@extras.marked("triton")
def test_they_run_and_are_right(site: Path, forks: Forks) -> None:
    done = forks.python("-c", SCRIPT, env=with_examples(site))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["cache"]["tokens"] == found[""]["tokens"] == found["drafts"]["tokens"]
    assert [one["planned"] for name, one in found.items() if name != "off"] == [True] * 8
    assert found["draft model"]["tokens"] == found[""]["tokens"]
    assert found["cache"]["pages"] == [16, 0]
    assert found["drafts"]["report"]["speculation"]["accepted"] > 0
    assert found["quantizer"]["report"]["quantizer"]["distribution"] == "jackfield-int8-rows"
    assert found["kernel"]["tokens"] == found[""]["tokens"]
    kernel = found["kernel"]["report"]["kernel"]
    assert kernel["distribution"] == "jackfield-cpp-silu"
    assert kernel["calls"] > 0
    assert found["native"]["tokens"] == found["rows"]["tokens"]
    native = found["native"]["report"]["compiler"]
    assert native["name"] == "native"
    assert "in Python" not in native["source"]  # its operator and all others ran in C
    assert max(found["off"]) < 1e-5, found["off"]


def test_the_page_of_examples_has_them_all() -> None:
    page = (ROOT / "docs/examples/README.md").read_text()
    assert len(EXAMPLES) == 6
    assert [one.name for one in EXAMPLES if f"({one.name})" not in page] == []


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_they_pass_their_checks(site: Path, example: Path, tmp_path: Path) -> None:
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    (kind,) = project["entry-points"]["jackfield"]
    name = project["name"].removeprefix("jackfield-")
    done = ran(site, "-m", "jackfield", "check", f"plugin:{name}", "--kind", kind, "--json")
    found = json.loads(done.stdout)
    assert [one for one in found["verdicts"] if one["outcome"] == "failed"] == []
    assert (done.returncode, found["passed"]) == (0, True)


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_their_own_tests_pass(site: Path, example: Path) -> None:
    done = ran(
        site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not declared", str(example)
    )
    assert done.returncode == 0, done.stdout + done.stderr
