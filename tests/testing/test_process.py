"""What breaks the process that checks a backend becomes a verdict, and the next check goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jackfield.cli import run as command
from jackfield.testing import process
from jackfield.testing.checks import Verdict
from jackfield.testing.process import Job, run

pytest_plugins = "pytester"

#: It aborts in the first process that it runs in, and hangs in the second; in the third it prints
#: and is right.
PLUGIN = """
import os, sys, time
from pathlib import Path
from jackfield import hookimpl
from jackfield.contracts import Attention, AttentionCapabilities, BoundAttention

PROCESSES = Path(__file__).with_name("processes")

class Moody(Attention):
    name = "moody"
    capabilities = AttentionCapabilities()
    known = None

    def bind(self, context):
        import torch
        from transformers.masking_utils import eager_mask

        if self.known is None:
            type(self).known = len(PROCESSES.read_text()) if PROCESSES.exists() else 0
            with PROCESSES.open("a") as file:
                file.write(".")

        def forward(module, query, key, value, attention_mask, *, scaling, **kwargs):
            if self.known == 0:
                os.abort()
            if self.known == 1:
                time.sleep(10_000)
            print("{not json", flush=True)
            os.write(1, b"\\xff\\n" * 50_000)
            print("and more", file=sys.stderr)
            scores = query @ key.transpose(-1, -2) * scaling
            if attention_mask is not None:
                scores = scores + attention_mask
            weights = scores.softmax(-1)
            return (weights @ value).transpose(1, 2).contiguous(), None

        return BoundAttention(forward, eager_mask)

@hookimpl
def jackfield_attention():
    return [Moody()]
"""


@pytest.fixture
def moody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moody.py").write_text(PLUGIN)
    metadata = tmp_path / "moody-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moody\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[jackfield]\nmoody = moody\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.long
def test_a_crash_a_hang_and_noise(moody: None) -> None:
    names = ("everyone.class", "padded.prefill.plain", "padded.chunks.plain")
    only = (*names, "padded.decode.plain")
    told: list[str] = []
    job = Job("plugin:moody", "attention", only, limit=0.15)
    found = run(job, lambda verdict: told.append(verdict.name))
    assert [one.name for one in found] == told
    by_name = {one.name: one for one in found}
    assert len(by_name) == len(found) == 4
    assert by_name.pop("everyone.class").outcome == "passed"
    broken, hung, right = by_name.values()
    assert (broken.outcome, broken.message) == ("failed", "ended the process: SIGABRT")
    assert (hung.outcome, hung.message) == ("failed", "did not end within 9 s")
    assert (right.outcome, right.name) == ("passed", "padded.decode.plain"), right.message


@pytest.mark.parametrize(
    ("ends", "told"), [("os._exit(3)", "exit code 3"), ("os.abort()", "SIGABRT")]
)
def test_how_a_process_ended_is_told(ends: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small program that begins a check; the plugin above ends one that is whole."""
    line = json.dumps({"check": "one", "capability": "c", "limit": 60.0})
    program = f"import os, sys; os.write(int(sys.argv[-1]), {line!r}.encode() + b'\\n'); {ends}"
    start = process.subprocess.Popen

    def small(command: list[str], **how: Any) -> Any:
        return start([sys.executable, "-c", program, *command[-2:]], **how)

    monkeypatch.setattr(process.subprocess, "Popen", small)
    verdicts: list[Verdict] = []
    found = process._run_some(Job("plugin:any"), verdicts, verdicts.append)
    assert found is not None
    assert (found.name, found.outcome) == ("one", "failed")
    assert found.message == f"ended the process: {told}"
    assert verdicts == []


@pytest.mark.long
def test_the_command_lists_chooses_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sdpa = ["check", "plugin:sdpa", "--kind", "attention"]
    assert (
        command([*sdpa, "--list", "--only", "everyone.c*", "--only", "padded.prefill.plain"]) == 0
    )
    out = capsys.readouterr().out
    assert "everyone.class  (contract)\n" in out
    assert "padded.prefill.plain  (" in out
    assert "packed" not in out
    assert command([*sdpa, "--only", "nothing.*"]) == 2
    assert "no check fits nothing.*; `--list` lists" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert command([*sdpa, "--only", "everyone.class", "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"passed": 1}
    assert {"python", "torch", "jackfield"} <= found["versions"].keys()
    assert (found["seed"], found["passed"]) == (0, True)
    assert "everyone.class" in page.read_text()


def pytest_says(pytester: pytest.Pytester, *arguments: str) -> dict[str, int]:
    return dict(pytester.runpytest_inprocess("-p", "no:randomly", *arguments).parseoutcomes())


def test_pytest_takes_several_backends_and_chooses(pytester: pytest.Pytester) -> None:
    both = ["--jackfield-backend", "attention:plugin:sdpa", "--jackfield-backend", "plugin:dynamic"]
    assert pytest_says(pytester, *both, "-k", "everyone.class")["passed"] == 2
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.jackfield_backend("plugin:sdpa", kind="attention")
        def test_declared(jackfield_check):
            jackfield_check()
        """
    )
    assert pytest_says(pytester, "--strict-markers", "-k", "everyone.class")["passed"] == 1
    assert pytest_says(pytester, *both, "-k", "everyone.class")["passed"] == 3


def test_pytest_says_which_backend_there_is_not(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.jackfield_backend("plugin:sdpaa")
        def test_declared(jackfield_check):
            jackfield_check()

        def test_of_nothing(jackfield_check):
            jackfield_check()
        """
    )
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*cannot check plugin:sdpaa: no installed plugin offers*"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.long
def test_pytest_shares_checks_among_processes(pytester: pytest.Pytester) -> None:
    both = ["--jackfield-backend", "attention:plugin:sdpa", "--jackfield-backend", "plugin:dynamic"]
    found = pytester.runpytest_subprocess("-n", "2", *both, "-k", "everyone or prefill.plain")
    outcomes = found.parseoutcomes()
    assert outcomes["passed"] >= 4
    assert outcomes.keys() <= {"passed", "skipped", "warnings"}
