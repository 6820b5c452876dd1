"""`jackfield bench`: its flags, tables, files and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from command_line import Cli
    from conftest import Liars

pytestmark = pytest.mark.usefixtures("here")

SMALL = ["--requests", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--rounds", "2"]


def test_the_first_row_is_what_others_are_compared_with(cli: Cli) -> None:
    done = cli("bench", "--attention", "sdpa", "--attention", "eager", "--cache", "dynamic", *SMALL)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[0].startswith("chat: 2 requests, 16 prompt tokens and 8 new ones a round")
    assert lines[1].split()[:2] == ["row", "tokens/s"]
    assert lines[2].split()[0] == "sdpa"
    assert lines[3].split()[-1] == "undecided"  # two rounds are none
    assert lines[6].split()[:3] == ["row", "first", "token"]
    assert [line.split()[0] for line in lines[7:9]] == ["sdpa", "eager"]
    assert "--rounds" in done.err


def test_json_has_every_round_and_run_can_be_named(cli: Cli) -> None:
    done = cli("bench", "run", "--attention", "sdpa", *SMALL, "--json")
    assert done.code == 0
    (row,) = done.json["rows"]
    assert len(row["rounds"]) == 2
    assert row["valid"] is True
    assert done.json["comparison"] is None


@pytest.mark.long
def test_a_row_that_lies_is_invalid_in_every_table(cli: Cli, liars: Liars, tmp_path: Path) -> None:
    liars("wrong")
    page = tmp_path / "page.html"
    flags = (
        "--cache",
        "dynamic",
        "--dtype",
        "float32",
        "--requests=4",
        "--prompt-tokens=30",
        "--new-tokens=16",
    )
    done = cli("bench", "wrong", "--against", "sdpa", *flags, "--rounds=3", "--html", str(page))
    assert done.code == 0
    tables = [line.split() for line in done.out.splitlines() if line.startswith("wrong ")]
    assert [words[-1] for words in tables] == ["invalid", "invalid"]
    assert "wrong: invalid: wrong tokens" in done.out
    assert 'class="invalid">invalid<' in page.read_text()
    assert cli("bench", "--attention", "wrong", *flags, "--rounds=3").code == 1


def test_a_saved_run_is_measured_again(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert cli("bench", "--attention", "sdpa", *SMALL, "--save", str(file)).code == 0
    whole = json.loads(file.read_text())
    done = cli("bench", "--attention", "sdpa", *SMALL, "--compare", str(file))
    assert done.code == 0
    assert "beside the saved run" in done.out
    for one in whole["rows"][0]["rounds"]:
        one["seconds"] /= 1000
    whole["rows"][0]["rounds"] *= 4
    file.write_text(json.dumps(whole))
    done = cli("bench", "--attention", "sdpa", *SMALL, "--rounds", "6", "--compare", str(file))
    assert done.code == 1
    assert "slower" in done.out


WRONG = [
    ("--workload nope", "there is no workload 'nope'"),
    ("--requests 0", "requests must be a whole number"),
    ("--prompt-tokens 600", "the model's context is 512"),
    ("--rate 0", "rate must be above 0"),
    ("--rounds 0", "rounds must be a whole number"),
    ("--margin 2", "margin must be above 0 and below 1"),
    ("--timeout 0", "--timeout must be above 0"),
    ("--attention nope", "there is no attention 'nope'"),
    ("--rival nope", "there is no rival 'nope'"),
    ("--against sdpa", "write jackfield bench plugin:NAME --against sdpa"),
    ("sdpa --against nope", "offers a backend 'nope'"),
    ("sdpa --against paged", "there is no cache 'sdpa'"),
    ("sdpa --attention eager", "are both attention"),
    ("--model ./nowhere", "is not a folder"),
    ("--compare ./nowhere.json", "cannot read"),
    ("--save ./nowhere/x.json", "--save 'nowhere/x.json' cannot be written"),
    ("--html ./nowhere/x.html", "cannot be written: there is no folder"),
    ("--selections ./nowhere.json", "cannot read"),
    ("--selections x --cache paged", "drop those beside it"),
    ("--decoding beam", "a search chooses other texts"),
    ("compare a.json", "Missing argument"),
    ("compare a.json b.json", "cannot read"),
]


@pytest.mark.parametrize(("flags", "text"), WRONG, ids=[flags for flags, _ in WRONG])
def test_a_mistake_is_one_line(cli: Cli, flags: str, text: str) -> None:
    cli("bench", *flags.split()).assert_failed(2, text)


def test_a_rival_that_is_not_installed_is_missed_before_anything_is_measured(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    done = cli("bench", "--rival", "llama.cpp")
    assert (done.code, done.out) == (2, "")
    assert "llama.cpp is not here; pip install llama-cpp-python, or drop this rival" in done.err


@pytest.mark.parametrize("name", ["run", "compare", "serve"])
def test_each_has_help_with_an_example(cli: Cli, name: str) -> None:
    done = cli("bench", name, "--help")
    assert (done.code, done.err) == (0, "")
    shown = "bench" if name == "run" else f"bench {name}"
    assert f"Example: jackfield {shown} " in " ".join(done.out.split())


def test_help_is_that_of_measuring_selections(cli: Cli) -> None:
    done = cli("bench", "--help")
    assert done.code == 0
    assert "--attention" in done.out
    assert "bench serve" in " ".join(done.out.split())
