"""`jackfield batch` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import Cli, cli
from jobs import asks, errors_of, read, write

from jackfield.cli import output as shown

if TYPE_CHECKING:
    import pytest
    from forking import Forks

__all__ = ["cli"]

GOOD = [asks("a"), asks("b")]


def test_what_is_done_is_one_line(cli: Cli, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    done = cli("batch", str(source), str(output))
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("2 of 2 lines are answered · attention ")
    assert done.err.count("\n") == 1
    assert len(read(output)) == 2
    again = cli("batch", str(source), str(output), "--json")
    assert (again.code, again.err) == (0, "")
    found = again.json
    counts = [found[name] for name in ("lines", "done_before", "answered", "failed")]
    assert counts == [2, 2, 2, 0]
    assert found["plan"]["chosen"]["cache"]["name"] == "paged"
    assert found["report"].keys() >= {"attention", "cache"}


def test_lines_that_failed_are_told_by_the_exit_code(cli: Cli, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [*GOOD, "no", asks("c", temperature=9)])
    output = tmp_path / "out.jsonl"
    for _ in range(2):
        done = cli("batch", str(source), str(output))
        assert (done.code, done.out) == (1, "")
        assert done.err.splitlines()[-1] == (
            f"error: 2 of 4 lines failed; {output}.errors.jsonl says why; the first: line 3: the "
            "line is not JSON: Expecting value: line 1 column 1 (char 0)"
        )
    assert cli("batch", str(source), str(output), "--json").json["failed"] == 2


def test_mistakes_are_one_line(cli: Cli, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    cli("batch", "no.jsonl", str(output)).assert_failed(2, "no.jsonl is not a file")
    bad = ("batch", str(source), str(output))
    cli(*bad, "--model", "no/such").assert_failed(2, "cannot find the model 'no/such'")
    cli(*bad, "--attention", "nope").assert_failed(2, "nope")
    cli(*bad, "--chat-template-kwargs", "{").assert_failed(2, "--chat-template-kwargs '{' is not")
    assert list(tmp_path.iterdir()) == [source]


def test_the_flags_reach_answers_and_engine(cli: Cli, tmp_path: Path) -> None:
    say = [{"role": "user", "content": "Hi"}]
    source = write(tmp_path / "in.jsonl", [asks("a", "/v1/chat/completions", messages=say)])
    output = tmp_path / "out.jsonl"
    flags = ("--max-completion-tokens", "1", "--attention", "eager", "--max-batch-size", "2")
    found = cli("batch", str(source), str(output), *flags, "--json").json
    assert found["plan"]["chosen"]["attention"]["name"] == "eager"
    (line,) = read(output)
    assert line["response"]["body"]["usage"]["completion_tokens"] == 1


def test_without_a_server_s_libraries_one_line_names_the_extra(forks: Forks) -> None:
    code = (
        "import sys; from jackfield.cli import run; sys.modules['prometheus_client'] = None; "
        "sys.exit(run(['batch', 'in.jsonl', 'out.jsonl']))"
    )
    done = forks.python("-c", code)
    assert done.returncode == 2
    assert done.stderr == (
        "error: batch jobs need what a server needs; pip install jackfield[serve] "
        "(prometheus_client is not here)\n"
    )


def test_a_terminal_sees_a_bar(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    def terminal(*, stderr: bool = False) -> Console:
        return Console(stderr=stderr, force_terminal=True, width=100, markup=False)

    monkeypatch.setattr(shown, "console", terminal)
    source = write(tmp_path / "in.jsonl", [*GOOD, "no"])
    done = cli("batch", str(source), str(tmp_path / "out.jsonl"))
    assert "3/3" in done.err
    assert "lines" in done.err


def test_the_lines_of_the_page_are_answered(cli: Cli, tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "docs/snippets/batch.jsonl"
    output = tmp_path / "answers.jsonl"
    assert cli("batch", str(source), str(output)).code == 0
    assert errors_of(output) == {}
    asked = [json.loads(line)["custom_id"] for line in source.read_text().splitlines()]
    assert [line["custom_id"] for line in read(output)] == asked
