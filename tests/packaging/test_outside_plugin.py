"""Packages of two files, really installed by pip and found by another process.

The good one is the one in the guide, word for word; the bad ones differ from it by one fault each.
A package of more files has the guide's backends of the other kinds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jackfield.hookspecs import HOOKS

if TYPE_CHECKING:
    from forking import Forks

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/writing-a-plugin.md").read_text()
NEW_TOKENS = 5
LAYERS = 2

#: distribution -> what to replace in the guide's package, and by what
FAULTS = {
    "jackfield-raises": ('"""Attention as two matrix products."""', "import no_such_lib"),
    "jackfield-misspells": ("def jackfield_attention", "def jackfield_atention"),
    "jackfield-claims": ('name = "plain"\n', 'name = "sdpa"\n'),
    "jackfield-ahead": ('"jackfield>=0.1,<0.2"', '"jackfield>=99"'),
}

SCRIPT = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import jackfield
from jackfield.registry.discovery import registry

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)).double()
out = {"plugins": [p.to_dict() for p in registry().plugins], "runs": {}, "errors": {}}
for name in json.loads(sys.argv[1]):
    try:
        with jackfield.load(model, attn_implementation=name) as engine:
            done = engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=5, eos_token_id=None)
            tokens = [c.token_ids for c in done]
            out["runs"][name] = {"tokens": tokens, "report": engine.report().to_dict()}
    except jackfield.JackfieldError as error:
        out["errors"][name] = f"{type(error).__name__}: {error}"
print(json.dumps(out))
"""


#: kind -> the guide's backend, and the argument of `jackfield.load` that selects it
OTHERS = {
    "cache": ("growing", "cache_implementation"),
    "decoding": ("stutter", "decoding"),
    "scheduler": ("turns", "scheduler"),
    "kernel": ("torch-rms-norm", "kernels"),
    "rotation": ("torch-rotary", "kernels"),
    "compiler": ("traced", "compile"),
    "quantizer": ("eight-bits", "quantization"),
}

OTHERS_SCRIPT = """
import json, sys
import jackfield

def run(**selection):
    with jackfield.load("demo", **selection) as engine:
        (done,) = engine.generate("Sort: 3 1 2. Sort: 3 1 2.", max_new_tokens=6)
        return {"tokens": done.token_ids, "report": engine.report().to_dict()}

out = {"": run()}
for kind, (name, argument) in json.loads(sys.argv[1]).items():
    out[kind] = run(**{argument: f"plugin:jackfield-others/{name}"})
print(json.dumps(out))
"""


def blocks(language: str) -> list[str]:
    """The guide's code blocks in `language`."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def write_package(folder: Path, distribution: str, fault: tuple[str, str] | None) -> None:
    """The two files of the guide, under another name, with one fault."""
    files = {"pyproject.toml": blocks("toml")[0], "jackfield_plain.py": blocks("python")[0]}
    if fault is not None:
        assert sum(text.count(fault[0]) for text in files.values()) == 1, fault
    folder.mkdir()
    module = distribution.replace("-", "_")
    for name, text in files.items():
        if fault is not None:
            text = text.replace(*fault)
            text = text.replace("jackfield-plain", distribution)
            text = text.replace("jackfield_plain", module)
        (folder / name.replace("jackfield_plain", module)).write_text(text)


def write_others(folder: Path) -> None:
    """A package of a module for each further block of the guide."""
    folder.mkdir()
    lines = []
    for kind, text in zip(OTHERS, blocks("python")[1:], strict=True):
        (folder / f"jackfield_others_{kind}.py").write_text(text)
        lines.append(f'{kind} = "jackfield_others_{kind}"')
    head, _, _ = blocks("toml")[0].rpartition("plain = ")
    build = '\n[tool.hatch.build]\ninclude = ["*.py"]\n'
    text = "\n".join([head.replace("jackfield-plain", "jackfield-others"), *lines, build])
    (folder / "pyproject.toml").write_text(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the good package and the bad ones."""
    sources = tmp_path_factory.mktemp("sources")
    target = tmp_path_factory.mktemp("site")
    for distribution, fault in {"jackfield-plain": None, **FAULTS}.items():
        write_package(sources / distribution, distribution, fault)
    write_others(sources / "jackfield-others")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
        + [str(folder) for folder in sources.iterdir()],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def ran(forks: Forks, site: Path, script: str, given: Any) -> dict[str, Any]:
    """What a script says, in a process of its own with that folder on its path."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = forks.python("-c", script, json.dumps(given), env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def seen(forks: Forks, site: Path) -> dict[str, Any]:
    """What such a process finds and runs with that folder on its path."""
    names = ["plugin:plain", "jackfield/sdpa", "eager", "auto", "sdpa", "jackfield-claims/sdpa"]
    return ran(forks, site, SCRIPT, names)


@pytest.fixture(scope="module")
def others(forks: Forks, site: Path) -> dict[str, Any]:
    """What the guide's backends of the other kinds do to the demo model, and what it does alone."""
    can = {k: v for k, v in OTHERS.items() if k != "quantizer" or find_spec("bitsandbytes")}
    return ran(forks, site, OTHERS_SCRIPT, can)


def plugin(seen: dict[str, Any], distribution: str) -> dict[str, Any]:
    (only,) = (p for p in seen["plugins"] if p["distribution"] == distribution)
    return dict(only)


def test_it_is_found(seen: dict[str, Any]) -> None:
    assert plugin(seen, "jackfield-plain") == {
        "entry_point": "plain",
        "module": "jackfield_plain",
        "distribution": "jackfield-plain",
        "version": "0.1.0",
        "state": "loaded",
        "cause": None,
        "problems": [],
        "backends": ["attention:plain"],
    }


def test_it_runs_and_is_on_record(seen: dict[str, Any]) -> None:
    """Two rows of one batch: a prefill, then a step per further token, in each of the layers."""
    assert seen["runs"]["plugin:plain"]["report"]["attention"] == {
        "kind": "attention",
        "name": "plain",
        "distribution": "jackfield-plain",
        "version": "0.1.0",
        "calls": LAYERS * NEW_TOKENS,
        "prefill": {str(layer): 1 for layer in range(LAYERS)},
        "decode": {str(layer): NEW_TOKENS - 1 for layer in range(LAYERS)},
    }


def test_it_is_right(seen: dict[str, Any]) -> None:
    tokens = seen["runs"]["plugin:plain"]["tokens"]
    assert [len(row) for row in tokens] == [NEW_TOKENS, NEW_TOKENS]
    assert tokens == seen["runs"]["eager"]["tokens"]


@pytest.mark.parametrize(
    ("distribution", "cause"),
    [
        ("jackfield-raises", "import failed: ModuleNotFoundError: No module named 'no_such_lib'"),
        (
            "jackfield-misspells",
            "there is no hook 'jackfield_atention'; did you mean 'jackfield_attention'?",
        ),
        (
            "jackfield-ahead",
            f"needs jackfield>=99, this is jackfield {version('jackfield')}: upgrade one of",
        ),
    ],
)
def test_a_bad_one_is_reported(seen: dict[str, Any], distribution: str, cause: str) -> None:
    bad = plugin(seen, distribution)
    assert (bad["entry_point"], bad["version"], bad["state"]) == ("plain", "0.1.0", "failed")
    assert bad["cause"].startswith(cause)
    assert bad["backends"] == []


def test_a_name_of_our_own_is_not_given_away(seen: dict[str, Any]) -> None:
    (own,) = (p for p in seen["plugins"] if p["entry_point"] == "attention-sdpa")
    assert own["problems"] == []
    (problem,) = plugin(seen, "jackfield-claims")["problems"]
    assert problem.endswith("jackfield's own: only 'plugin:jackfield-claims/sdpa' is this one")
    assert seen["errors"] == {}
    for name, distribution in (
        ("sdpa", "jackfield"),
        ("jackfield-claims/sdpa", "jackfield-claims"),
    ):
        run = seen["runs"][name]["report"]["attention"]
        assert (run["distribution"], run["calls"]) == (distribution, LAYERS * NEW_TOKENS)


@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_kind_of_the_guide_runs(others: dict[str, Any], kind: str) -> None:
    if kind not in others:
        pytest.skip("needs jackfield[bnb]")
    ran = others[kind]["report"]["kernel" if kind == "rotation" else kind]
    assert (ran["distribution"], ran["name"]) == ("jackfield-others", OTHERS[kind][0])
    assert ran["calls"] > 0
    if kind != "quantizer":  # which rounds
        assert others[kind]["tokens"] == others[""]["tokens"]


def test_the_guide_has_every_kind_and_files_that_exist() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|.*\| (.*) \|$", GUIDE, re.MULTILINE)
    assert {kind: hook for kind, hook, _ in rows} == HOOKS
    for _, _, files in rows:
        for file in re.findall(r"`([^`]+)`", files):
            assert (ROOT / "plugins/jackfield_plugins" / file).exists(), file
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert [kind for kind in HOOKS if f"`{kind}`" not in contributing] == []


@pytest.mark.parametrize("name", ["jackfield/sdpa", "eager", "auto"])
def test_the_built_ins_work_on(seen: dict[str, Any], name: str) -> None:
    own = [p for p in seen["plugins"] if p["distribution"] == "jackfield"]
    assert {p["state"] for p in own} == {"loaded"}
    run = seen["runs"][name]
    assert run["tokens"] == seen["runs"]["eager"]["tokens"]
    assert run["report"]["attention"]["distribution"] == "jackfield"
    assert run["report"]["attention"]["calls"] == LAYERS * NEW_TOKENS
