"""`jackfield tune`: its mistakes before anything is loaded, and what it writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jackfield.benchmarking.contenders import Contender
from jackfield.benchmarking.preparing import reader
from jackfield.errors import UsageError
from jackfield.planning.profile_files import read_profile
from jackfield.tuning.expected import read_answers

if TYPE_CHECKING:
    from command_line import Cli

#: All that has candidates here but for the batch, so that few processes are needed.
FIXED = (
    "--attention", "sdpa", "--cache", "dynamic", "--compile", "none", "--dtype", "float32",
    "--device", "cpu",
)  # fmt: skip
SMALL = ("--requests", "2", "--prompt-tokens", "8", "--new-tokens", "4")

MISTAKES = {
    "a budget of nothing": (("--budget", "0"), "cannot read --budget '0': write 90s, 2m or 1h"),
    "a budget in words": (("--budget", "long"), "cannot read --budget 'long'"),
    "no workload": (("--workload", "chess"), "there is no workload 'chess'"),
    "a workload that is too long": (("--prompt-tokens", "600"), "the model's context is 512"),
    "a bound": (("--max-rise", "-1"), "--max-rise must be at least 0"),
    "another bound": (("--max-drop", "nan"), "--max-drop must be at least 0"),
    "a folder": (("--output", "no/such/profile.toml"), "no/such"),
    "a page": (("--html", "no/such/page.html"), "no/such"),
    "one file": (("--html", "profile.toml"), "--output and --html name one file, profile.toml"),
    "no text": (("--text", "no.txt"), "no.txt"),
    "no answers": (("--quality", "no.jsonl"), "cannot read no.jsonl"),
    "no backend": (("--attention", "sdpb"), "there is no attention 'sdpb'"),
    "a profile": (("--profile", "p.toml"), "tune takes no --profile"),
    "a lock": (("--locked", "l.json"), "tune takes no --locked"),
    "no device": (("--device", "tpu"), "tpu"),
    "a search": (("--decoding", "beam"), "a search chooses other texts than greedy decoding"),
    "a long name": (("--workload", "x" * 300), "there is no workload 'xxx"),
    "no room": (("--max-memory", "cpu=1MB", "--device", "cpu"), "1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_loads_nothing(
    name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, says = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jackfield.benchmarking.running.Worker", None)
    cli("tune", "demo", *arguments).assert_failed(2, says)
    assert list(tmp_path.iterdir()) == []


def test_a_workload_with_an_error_names_its_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": 3}\n')
    cli("tune", "demo", "--workload", "w.jsonl").assert_failed(2, "w.jsonl, line 2: ")


ANSWERS = {
    "": "has no answers",
    "3": "line 1: it is no JSON object",
    "{": "line 1: it is not JSON",
    '\n{"answer": "a"}': "line 2: it needs a prompt or messages, and not both",
    '{"prompt": "a", "messages": [], "answer": "a"}': "it needs a prompt or messages, and not both",
    '{"prompt": "a"}': "answer must be a text, not None",
    '{"prompt": "a", "answer": " "}': "answer must be a text",
    '{"prompt": "a", "answer": "b", "max_new_tokens": 0}': "max_new_tokens must be a whole",
    '{"prompt": 3, "answer": "b"}': "a prompt is a text",
    '{"messages": "x", "answer": "b"}': "messages are a list",
    '{"prompt": "a", "answr": "b"}': "no field 'answr'.*did you mean 'answer'",
}


@pytest.mark.parametrize("content", ANSWERS)
def test_answers_with_an_error_are_refused(content: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UsageError, match=ANSWERS[content]) as caught:
        read_answers(file, *reader(Contender("demo", {"model": "demo"})))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"messages": [{"role": "nobody", "content": "Hi"}]}, "nobody"),
        ({"prompt": "x " * 600}, r"the model's context is 512"),
        ({"prompt": "Hi", "max_new_tokens": 100_000}, r"100000 more, and the model's context is 5"),
    ],
)
def test_a_question_that_the_model_cannot_be_asked_is_named_before_anything_is_loaded(
    line: dict[str, Any], says: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jackfield.benchmarking.running.Worker", None)
    lines = [{"prompt": "Hi", "answer": "Ho"}, {**line, "answer": "Ho"}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = cli("tune", "demo", "--quality", "a.jsonl")
    done.assert_failed(2, "a.jsonl, line 2: ")
    assert re.search(says, done.err)


def test_answers_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 and 2?"}]
    lines = [{"prompt": "a", "answer": "b"}, {"messages": chat, "answer": "4", "max_new_tokens": 3}]
    (file := tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    found = read_answers(file, *reader(Contender("demo", {"model": "demo"})))
    assert found == [("a", "b", 64), (chat, "4", 3)]


def test_the_table_loses_nothing_where_it_is_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jackfield.cli.tune import _print

    monkeypatch.setenv("COLUMNS", "80")
    verdict = "taken, then dropped: in the end not faster than auto for certain"
    tried = {
        "rung": "precision", "label": "bfloat16", "verdict": verdict, "rounds": 8,
        "tokens_per_second": 522.5, "seconds": 0.683, "ratio": 1.005, "peak_bytes": 58_200_000,
        "perplexity": 168.7,
    }  # fmt: skip
    last = {"ratio": 0.7, "low": 0.59, "high": 0.82, "rounds": 8, "verdict": "faster for certain"}
    _print({"evidence": [tried], "made": {"workload": {"arrivals": False}, "beside_auto": last}})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    begin = next(line.index("taken") for line in lines if "taken" in line)
    folded = " ".join(" ".join(line[begin:] for line in lines).split())
    assert verdict in folded
    assert "0.59 to 0.82 in 8 rounds: faster for certain" in folded


@pytest.mark.long
def test_a_profile_is_written_and_taken(cli: Cli, tmp_path: Path) -> None:
    file, page = tmp_path / "p.toml", tmp_path / "p.html"
    (answers := tmp_path / "a.jsonl").write_text('{"prompt": "Hi", "answer": "Ho"}')
    asked = (*FIXED, *SMALL, "--budget", "10m", "-o", str(file), "--html", str(page))
    done = cli("tune", "demo", *asked, "--quality", str(answers))
    assert done.code == 0, done
    assert "auto: " in done.err
    assert "attention: stays sdpa; as you named it" in done.err
    assert "batch 1 at a time" in done.out
    found = read_profile(file)
    assert found.made["finished"] is True
    assert found.selections["attn_implementation"] == "sdpa"
    assert page.read_text().startswith("<!doctype html>")
    done = cli("generate", "Hi", "--profile", str(file), "--max-new-tokens", "2")
    assert done.code == 0
    assert "warning" not in done.err


@pytest.mark.long
def test_ctrl_c_writes_the_best_so_far(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    command = [sys.executable, "-m", "jackfield", "tune", "demo", *SMALL, "--budget", "10m", "-o"]
    with subprocess.Popen(
        [*command, str(file)], stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stderr is not None
        while "placement" not in process.stderr.readline():
            pass
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # as people do who wait
        said = process.stderr.read()
    assert process.returncode == 130
    assert "stopped: " in said
    assert "Traceback" not in said
    found = read_profile(file)
    assert found.selections["device_map"] == "cpu"
    assert {row["label"] for row in found.evidence} >= {"auto"}
