"""`jackfield new`: what is written is whole, and what cannot be written is told in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from written import VARIANTS, Variant, python

from jackfield.authoring import packages as authoring
from jackfield.authoring import write_package
from jackfield.cli import run
from jackfield.hookspecs import HOOKS

if TYPE_CHECKING:
    from forking import Forks

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: What each backend does to the demo model; what it says about itself.
SCRIPT = """
import json, sys
import jackfield
PROMPTS = ["Once upon a time", "Sort these numbers: 41 7 88 23. Sort these numbers: 41 7"]

def run(**selection):
    with jackfield.load("demo", **selection) as engine:
        done = engine.generate(PROMPTS, max_new_tokens=10)
        told = engine.explain(), engine.plan.memory()  # asks all that a plan may ask of a backend
        return {
            "tokens": [one.token_ids for one in done],
            "report": engine.report().to_dict(),
            "planned": None not in told,
        }

out = {"": run()}
for name, selection in json.loads(sys.argv[1]).items():
    out[name] = run(**selection)
print(json.dumps(out))
"""

RUNS = {
    "plainly": {"attn_implementation": "plugin:plainly"},
    "plainly, packed": {"attn_implementation": "plugin:plainly", "cache_implementation": "paged"},
    "pages": {"cache_implementation": "plugin:pages"},
    "pages, few of them": {"cache_implementation": "plugin:pages?num_tokens=64&page_size=8"},
    "pages, drafts": {"cache_implementation": "plugin:pages", "decoding": "plugin:own-past"},
    "rows": {"cache_implementation": "plugin:rows"},
    "rows, drafts": {"cache_implementation": "plugin:rows", "decoding": "plugin:own-past"},
    "traced": {"compile": "plugin:traced"},
    "norms": {"kernels": "plugin:norms"},
    "row_wise": {"quantization": "plugin:row_wise"},
    "patient": {"scheduler": "plugin:patient?patience=0.01"},
}


@pytest.fixture(scope="module")
def ran(forks: Forks, site: Path) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = forks.python("-c", SCRIPT, json.dumps(RUNS), env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_what_is_written_runs_and_is_right(ran: dict[str, Any], name: str) -> None:
    (kind, own), *_ = [(v.kind, v.name) for v in VARIANTS if v.name == name.partition(",")[0]]
    found = ran[name]["report"][kind]
    distribution = "jackfield-" + re.sub("[._]", "-", own)
    assert (found["name"], found["distribution"]) == (own, distribution)
    assert found["calls"] > 0
    assert ran[name]["planned"]
    if kind == "quantizer":  # it rounds
        assert ran[name]["tokens"][0] == ran[""]["tokens"][0]
    else:
        assert ran[name]["tokens"] == ran[""]["tokens"]


def test_drafts_of_the_own_past_are_kept(ran: dict[str, Any]) -> None:
    speculation = ran["pages, drafts"]["report"]["speculation"]
    assert 0 < speculation["accepted"] <= speculation["proposed"]


@pytest.mark.parametrize("kind", HOOKS)
def test_there_is_a_template_of_every_kind(kind: str) -> None:
    assert kind in {variant.kind for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_package_is_a_package(packages: list[Path], variant: Variant) -> None:
    """Its files, its requirements, its entry point, and nothing that was left for somebody."""
    folder = packages[VARIANTS.index(variant)]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    module = project["name"].replace("-", "_")
    assert project["entry-points"]["jackfield"] == {variant.kind: module}
    (own,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "jackfield")
    assert PROJECT["version"] in own.specifier
    assert project["requires-python"] == PROJECT["requires-python"]
    sources = folder / module if (folder / module).is_dir() else folder / f"{module}.py"
    for path in (sources, folder / "README.md", folder / ".github/workflows/test.yml"):
        assert path.exists()
    for file in (path for path in folder.rglob("*") if path.is_file()):
        text = file.read_text()
        assert not re.search(r"\{%|%\}|(?<!\$)\{\{|TODO|\bNAME\b|jinja", text), file
        assert text == text.lstrip("\n"), file
        assert text.endswith("\n"), file
        assert not text.endswith("\n\n"), file


def test_packages_pass_a_linter(packages: list[Path]) -> None:
    for command in (
        ["check", "--select", "E,F,I,B,UP,W,SIM,RUF,T20", "--ignore", "RUF002,RUF001,RUF003"],
        ["format", "--check"],
    ):
        for folder in packages:  # one by one: what is first-party depends on the folder
            done = subprocess.run(
                [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100", "."],
                cwd=folder,
                capture_output=True,
                text=True,
            )
            told = done.stdout.replace("benchmarks", "")
            errors = [line for line in told.splitlines() if re.match(r"[A-Z]+\d+ ", line)]
            assert [e for e in errors if not e.startswith("T201")] == [], done.stdout
            assert command[0] == "check" or done.returncode == 0, done.stdout


def test_modules_import_without_torch(site: Path) -> None:
    modules = [f"jackfield_{re.sub('[-.]', '_', variant.name)}" for variant in VARIANTS]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    assert python(site, "-c", code).stdout == "False\n"


@pytest.mark.parametrize("name", ["tiled", "one.pass"])
def test_without_triton_its_backends_say_so(packages: list[Path], name: str) -> None:
    """Where it is absent, and where there is no GPU and nobody asked for the interpreter."""
    (variant,) = (v for v in VARIANTS if v.name == name)
    folder = packages[VARIANTS.index(variant)]
    module = f"jackfield_{name.replace('.', '_')}"
    code = (
        f"import importlib.util as u, {module} as m; "
        f"find = u.find_spec; b = m.jackfield_{variant.kind}()[0]; "
        "u.find_spec = lambda n, *a: None if n == 'triton' else find(n, *a); print(b.available())"
    )
    assert "pip install triton" in python(folder, "-c", code).stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tension", "x"], "there is no kind 'tension'; did you mean 'attention'?; kinds: "),
        (["attention", "My Kernel"], "'My Kernel' cannot be the name of a backend"),
        (["attention", "4bit"], "'4bit' cannot be the name of a backend"),
        (["attention", "x-"], "'x-' cannot be the name of a backend"),
        (["attention", ""], "'' cannot be the name of a backend"),
        (["attention", "../x"], "'../x' cannot be the name of a backend"),
        (["attention", "ünder"], "cannot be the name of a backend"),
        (["attention", "x" * 41], "41 characters is too long"),
        (["attention", "jackfield-x"], "leave 'jackfield-' out: jackfield new attention x"),
        (["attention", "sdpa"], "attention 'sdpa' of jackfield"),
        (["cache", "plugins"], "the module of 'plugins' would be jackfield_plugins"),
        (["cache", "x", "--triton"], "--triton is for attention and kernel, not for a cache"),
        (["kernel", "x", "--layout", "packed"], "--layout is for a cache"),
        (["cache", "x", "--layout", "heap"], "a cache is packed or padded, not 'heap'"),
        (["cache", "x", "--folder", "there/is/none"], "there is no folder "),
        (["cache", "x", "--folder", "full"], "the folder full is there and is not empty"),
        (["cache", "x", "--folder", "full/file"], "is there and is no folder"),
        (["cache", "x", "--folder", "full/file/x"], "there is no folder "),
        (["cache", "x", "--folder", "/proc/x"], "the folder /proc/x cannot be written: "),
    ],
)
def test_bad_input_is_told_in_a_line_and_nothing_is_left(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    assert run(["new", *arguments]) == 2
    out, error = capsys.readouterr()
    assert told in error
    assert (out, error.count("\n")) == ("", 1)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["full", "full/file"]
    assert (tmp_path / "full/file").read_text() == "mine"


def test_what_is_installed_under_that_name_is_told(site: Path, tmp_path: Path) -> None:
    for arguments, told in (
        (["cache", "pages"], "cache 'pages' of jackfield-pages 0.1.0 has that name already"),
        (["attention", "pages"], "jackfield-pages 0.1.0 is installed already; take another name"),
    ):
        done = python(site, "-m", "jackfield", "new", *arguments, cwd=tmp_path)
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
        assert list(tmp_path.iterdir()) == []


def test_without_copier_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "copier" else find(name)
    )
    assert run(["new", "cache", "mine"]) == 2
    assert "pip install 'jackfield[new]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # copier's scan
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fault", ["files/pyproject.toml.jinja", "copier.yml"])
def test_a_failure_midway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, fault: str
) -> None:
    import shutil

    template = tmp_path / "template"
    shutil.copytree(authoring.TEMPLATE, template)
    (template / fault).write_text("{% oops: [")
    monkeypatch.setattr(authoring, "TEMPLATE", template)
    folder = tmp_path / "new"
    if there:
        folder.mkdir()
    with pytest.raises(Exception, match=r".+"):
        write_package("scheduler", "mine", folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "template"][not there :]
    assert not there or list(folder.iterdir()) == []


def test_an_empty_folder_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new", "scheduler", "mine", "--folder", ".", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["distribution"], told["module"]) == ("jackfield-mine", "jackfield_mine")
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert set(told["files"]) == files
    assert "jackfield_mine.py" in files


def test_flags_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    told = capsys.readouterr().out
    assert {
        kind for kind, flag in authoring.FLAGS.items() if not re.search(f"{flag}[ ,]", told)
    } == set()
    assert authoring.FLAGS.keys() == HOOKS.keys()
