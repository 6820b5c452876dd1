"""Pages of Markdown from saved runs: what the runs say, and nothing that they do not say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from made_runs import FAST, SLOW, row, run

from jackfield.benchmarking import saved
from jackfield.benchmarking.markdown import markdown

if TYPE_CHECKING:
    from command_line import Cli


DOCS = Path(__file__).parents[2] / "docs"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_each_figure_has_where_when_and_how() -> None:
    found = markdown({"demo-one": run(row("a", FAST), row("b", SLOW)), "two": run(row("c", FAST))})
    assert [line for line in found.splitlines() if line[:2] == "##"] == ["## Demo one", "## Two"]
    assert found.count("12 rounds on a processor, 2 cores; torch 2; 2026-01-01") == 2
    assert found.count("$ jackfield bench\n") == 2
    rows = [cells(line) for line in found.splitlines() if line.startswith(("| a", "| b"))]
    new = 10
    assert rows[0][:4] == ["a", f"{new / 0.1055:.4g}", "1", ""]
    assert rows[1][0] == "b"
    assert rows[1][2].startswith("1.30 (")
    assert rows[1][3:] == ["slower", "34 ms", "6.86 ms", "50.0 MB", "18%", "36%"]
    assert found.count("are shares of 40.0 GB/s and 200 GFLOP/s (cpu float32), measured") == 2


def test_a_row_that_is_no_result_has_its_reason_and_no_figure() -> None:
    bad = row("x|y", SLOW, reasons=("wrong tokens",))
    found = markdown({"run": run(row("a", FAST), bad)})
    (line,) = [line for line in found.splitlines() if "x\\|y" in line and line[0] == "|"]
    assert cells(line.replace("\\|", "/")) == ["x/y", "invalid", *[""] * 7]
    assert "- x|y: wrong tokens" in found


def test_a_base_that_is_no_result_leaves_speeds() -> None:
    found = markdown({"run": run(row("a", FAST, reasons=("it crashed",)), row("b", FAST))})
    (line,) = [line for line in found.splitlines() if line.startswith("| b")]
    assert cells(line)[:4] == ["b", f"{10 / 0.1055:.4g}", "", ""]


def test_a_page_is_written_and_held_to_its_runs(cli: Cli, tmp_path: Path) -> None:
    first, second, page = tmp_path / "b.json", tmp_path / "a.json", tmp_path / "page.md"
    saved.save(run(row("one", FAST)), first)
    saved.save(run(row("two", FAST)), second)
    asked = ["bench", "page", str(first), str(second)]
    printed = cli(*asked)
    assert printed.code == 0
    assert printed.out.index("## A") < printed.out.index("## B")
    assert cli(*asked, "--output", str(page), "--check").code == 1
    assert not page.exists()
    assert cli(*asked, "--output", str(page)).code == 0
    assert page.read_text() == printed.out
    assert cli(*asked, "--output", str(page), "--check").code == 0
    saved.save(run(row("one", SLOW)), first)
    done = cli(*asked, "--output", str(page), "--check")
    assert done.code == 1
    assert "is not what these runs say; make it anew" in done.err
    assert page.read_text() == printed.out


WRONG = [
    ("a.json --check", "--check compares a page with its runs; add --output FILE"),
    ("nowhere.json", "cannot read"),
    ("a.json ./again/a.json", "two runs have one name"),
    ("a.json --output ./nowhere/page.md", "--output 'nowhere/page.md' cannot be written"),
    ("text.json", "is no run that `jackfield bench --save FILE` wrote"),
    ("", "Missing argument"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=[flags for flags, _ in WRONG])
def test_a_mistake_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved.save(run(row("one", FAST)), tmp_path / "a.json")
    (tmp_path / "text.json").write_text("[]")
    cli("bench", "page", *flags.split()).assert_failed(2, words)


def test_the_measured_page_is_what_its_runs_say(cli: Cli) -> None:
    runs = sorted(map(str, (DOCS / "runs").glob("*.json")))
    assert len(runs) >= 2
    done = cli("bench", "page", *runs, "--output", str(DOCS / "measured.md"), "--check")
    assert done.code == 0, done.err
