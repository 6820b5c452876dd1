"""All code of `make gpu` runs here on tiny models, so that the first GPU meets no silly mistake."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import extras
import pytest
import torch
from families import config_of
from gpucheck import existing_tests, kernels, metadata, page, runner
from gpucheck.bench import Bench, Gpu, Host
from gpucheck.counters import triton_compilations
from gpucheck.judging import bound_of, verdict
from gpucheck.models import prompts_of, random_model
from gpucheck.results import LOST, Results, SkippedError, Values, read
from gpucheck.sizes import GPU, TINY
from gpucheck.speed import Race
from gpucheck.stages import STAGES, Stage
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, LlamaConfig

import jackfield
from jackfield.contracts import PackedLayer

FILES = sorted(Path(page.__file__).parent.glob("*.py"))
#: What each stage must have found right on a processor: no stage passes by skipping all.
RIGHT = {
    "machine": {"host", "libraries", "plugins", "bandwidth"},
    "kernels": {"norm triton-rms-norm: 3 × 24, float32"},
    "engines": {"paged, triton, swap", "weights read to one device"},
    "parity": {"llama", "gpt-oss"},
    "counters": {
        "waits a step: paged, triton",
        "pools of engines one after another",
        "kernels behind sdpa in an engine",
    },
    "decode-1": {"paged, triton", "paged, triton: texts", "generate, static cache, compiled"},
    "decode-32": {
        "paged, triton: texts",
        "paged, triton: profile",
        "generate_batch",
        "paged, triton, against generate_batch",
    },
    "prefill": {"16 tokens: generate", "16 tokens: paged, triton"},
    "check": {"kernel cpu-rms-norm"},
}


def tiny(found: list[Values], stage: str = "a stage") -> Bench:
    return Bench(Host(), TINY, Results(stage, found.append))


@pytest.mark.parametrize("stage", [s for s in STAGES if s.name in RIGHT], ids=lambda s: s.name)
@pytest.mark.filterwarnings("default")
@pytest.mark.one_in(4)
def test_every_stage_runs_and_is_right_on_a_processor(stage: Stage) -> None:
    if any("triton" in check for check in RIGHT[stage.name]):
        extras.needs("triton")
    found: list[Values] = []
    importlib.import_module(f"gpucheck.{stage.module}").run(tiny(found, stage.name))
    assert [record for record in found if record["ok"] is False] == []
    assert RIGHT[stage.name] <= {record["check"] for record in found if record["ok"]}
    json.dumps(found)  # nothing in it needs a stranger's class to be read again


def test_the_stages_fit_into_ten_minutes_and_exist() -> None:
    assert sum(stage.limit for stage in STAGES) < 600
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    assert {s.name for s in STAGES} == {*RIGHT, "tests"}
    for stage in STAGES:
        assert callable(importlib.import_module(f"gpucheck.{stage.module}").run)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that sees one key too many, or adds a little."""
    bench = tiny([])
    case = next(c for c in kernels.cases(bench) if c.family == "mistral")
    assert kernels.attention_error(bench, "sdpa", case)["ok"]
    exact = kernels.reference
    for wrong in (
        lambda _, query, layer, **kwargs: exact(query, seeing_more(layer), **kwargs).float(),
        lambda _, query, layer, **kwargs: exact(query, layer, **kwargs).float() + 1e-4,
        lambda _, query, layer, **kwargs: exact(query, layer, **kwargs).float().log(),
    ):
        monkeypatch.setattr(kernels, "bound_to", lambda *_, wrong=wrong: bound_to(packed=wrong))
        assert not kernels.attention_error(bench, "sdpa", case)["ok"]


@extras.marked("triton")
def test_a_wrong_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does nothing."""
    bench = tiny([])
    assert kernels.norm_error(bench, "triton-rms-norm", 3, 24, "float32")["ok"]
    monkeypatch.setattr(kernels, "exactly", lambda norm, given: given.double())
    monkeypatch.setattr(kernels, "plainly", lambda norm, given: given)
    assert not kernels.norm_error(bench, "triton-rms-norm", 3, 24, "float32")["ok"]


def bound_to(**what: Any) -> tuple[Any, None]:
    """A choice that is bound to `what`."""
    bound = SimpleNamespace(**what)
    return SimpleNamespace(registered=SimpleNamespace(bind=lambda _: bound)), None


def seeing_more(layer: Any) -> Any:
    return PackedLayer(layer.keys, layer.values, replace(layer.tables, window=layer.window + 1))


def test_a_wrong_text_is_found() -> None:
    model = random_model(TINY.large, "cpu", "float32")
    prompts = prompts_of(2, 5, 120)
    bound = bound_of(model, prompts)
    assert 0 < bound < 1e-3
    race = Race(tiny([]), model, model, prompts, 1.0, bound)
    expected = race.generate(4)
    assert race.verdict(model, expected, expected)["ok"]
    assert verdict(model, prompts, expected, expected, 0.0) == {"ok": True, "tokens": "equal"}
    wrong = [expected[0], [*expected[1][:3], (expected[1][3] + 1) % 120]]
    assert not verdict(model, prompts, expected, wrong, 1e-3)["ok"]
    assert (
        "1 of 2 part, the first at token 3"
        in verdict(model, prompts, expected, wrong, 1e-3)["tokens"]
    )
    assert not verdict(model, prompts, expected, [text[:3] for text in expected], 100.0)["ok"]


def test_every_name_that_it_uses_exists() -> None:
    """What is only reached on a GPU as well: `torch.cuda.…` of a build without CUDA has all."""
    seen = 0
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("torch."):
                found: Any = torch
                for part in name.split(".")[1:]:
                    assert hasattr(found, part), f"{file.name}: {name}"
                    found = getattr(found, part)
                seen += 1
    assert seen > 30


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "-"


class FakeCuda:
    """As much of `torch.cuda` as `Gpu` calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode: Any = 0
        self.waited = 0
        for name, value in {
            "get_device_name": lambda _: "a GPU",
            "synchronize": self.synchronize,
            "memory_reserved": lambda _: 7,
            "get_device_properties": lambda _: SimpleNamespace(
                memory_clock_rate=3_201_000, memory_bus_width=6144
            ),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
            "Event": self.event(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def synchronize(self, device: Any = None) -> None:
        self.waited += 1

    def set_mode(self, mode: Any) -> None:
        self.mode = mode

    def event(self) -> type:
        class Event:
            def __init__(self, enable_timing: bool = False, done: bool = False) -> None:
                self.done = done

            def record(self) -> None:
                self.at = time.perf_counter()

            def query(self) -> bool:
                return self.done

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return 1000 * (other.at - self.at)

        return Event

    def read(self) -> None:
        """What torch says of a copy to the host while the mode is "warn"."""
        if self.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)


def test_a_gpu_is_timed_asked_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, gpu = FakeCuda(monkeypatch), Gpu()
    assert gpu.model == "a GPU"
    assert gpu.held() == 7
    assert gpu.peak_bandwidth() == pytest.approx(4.9e12, rel=0.01)  # an H200
    assert gpu.seconds(lambda: time.sleep(0.01)) >= 0.01
    before = torch.cuda.Event.synchronize
    with gpu.waits() as found:
        for _ in range(3):
            cuda.read()  # three of one line
        torch.cuda.Event().synchronize()
        torch.cuda.Event(done=True).synchronize()  # type: ignore[call-arg]  # of the fake
        torch.cuda.synchronize()
    assert sorted(found.values()) == [1, 1, 3]
    assert any("test_gpucheck.py:" in place for place in found)
    cuda.read()
    assert sum(found.values()) == 5
    assert torch.cuda.Event.synchronize is before
    assert cuda.mode == 0


def test_what_spans_work_in_a_profile_is_no_work() -> None:
    """A compiled region is shown on the GPU as well, from its first kernel to its last."""
    kinds = torch.autograd.DeviceType
    events = [
        SimpleNamespace(device_type=kind, is_user_annotation=spans)
        for kind, spans in ((kinds.CPU, False), (kinds.CUDA, True), (kinds.CUDA, False))
    ]
    assert list(map(Gpu().works, events)) == [False, False, True]
    with torch.profiler.profile() as profiler, torch.profiler.record_function("a region"):
        torch.ones(3).sum()
    spans = {e.name: e.is_user_annotation for e in profiler.events() or ()}
    assert spans["a region"]
    assert not spans["aten::sum"]


def test_compilations_are_counted_and_the_hook_is_given_back() -> None:
    knobs = pytest.importorskip("triton.knobs", reason="needs jackfield[triton]")
    before = knobs.runtime.jit_post_compile_hook
    with triton_compilations() as found:
        hook = knobs.runtime.jit_post_compile_hook
        assert hook(key="k", repr="r", fn=type("F", (), {"name": "mine"}), compile={}) is None
    assert found == {"mine": 1}
    assert knobs.runtime.jit_post_compile_hook is before


def test_a_check_that_raises_is_a_result_and_the_next_one_runs() -> None:
    found: list[Values] = []
    results = Results("s", found.append)
    with results.check("breaks"):
        raise RuntimeError("CUDA error: an illegal memory access\nand more")
    with results.check("cannot"):
        raise SkippedError("no such thing")
    with results.check("is wrong") as values:
        values["ok"] = False
    assert [(r["check"], r["ok"]) for r in found] == [
        ("breaks", False), ("cannot", None), ("is wrong", False),
    ]  # fmt: skip
    assert found[0]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    with pytest.raises(KeyboardInterrupt), results.check("is stopped"):
        raise KeyboardInterrupt


STAGE = """
import json, os, subprocess, sys, time
def tell(**record):
    with open({path!r}, "a") as file:
        file.write(json.dumps(record) + "\\n")
tell(stage={name!r}, check="first", ok=True)
"""


def test_a_cut_and_a_crash_lose_nothing(tmp_path: Path) -> None:
    lines = tmp_path / runner.LINES
    ends = {
        "hangs": "subprocess.Popen(['sleep', '77']); print(os.getpid()); time.sleep(77)",
        "whole": "",
        "crashes": "sys.exit('out of ideas')",
        "later": "tell(stage='later', check='gpu', ok=True, name='a GPU')",
    }
    stages = [Stage(name, "", 2 if name == "hangs" else 30, "") for name in ends]

    limits = {}

    def command(stage: Stage) -> list[str]:
        limits[stage.name] = stage.limit
        code = STAGE.format(path=str(lines), name=stage.name) + ends[stage.name]
        return [sys.executable, "-c", code]

    started = time.monotonic()
    assert not runner.run_stages(tmp_path, command, stages)
    assert time.monotonic() - started < 30
    whole = json.loads((tmp_path / runner.RESULT).read_text())
    said = {stage["stage"]: stage["ended"] for stage in whole["stages"]}
    assert said == {
        "hangs": "was cut at its limit of 2 s",
        "whole": "whole",
        "crashes": "ended with exit status 1",
        "later": "whole",
    }
    assert whole["stages"][2]["log"] == ["out of ideas"]
    assert limits["hangs"] == 2
    assert limits["later"] > limits["crashes"] > 30  # what those before it left is its own too
    assert [r["stage"] for r in whole["results"]] == [*ends, "later"]
    assert whole["gpu"] == "a GPU"
    assert runner.run_stages(tmp_path, command, stages[1:2])


def test_all_is_over_when_it_is_to_be(tmp_path: Path) -> None:
    """A machine that is lent for ten minutes ends what runs then, without a word."""
    stages = [Stage(name, "", 60, "") for name in ("hangs", "late")]
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = time.monotonic()
    assert not runner.run_stages(tmp_path, lambda _: code, stages, started + 3)
    assert time.monotonic() - started < 30
    whole = json.loads((tmp_path / runner.RESULT).read_text())
    assert [stage["stage"] for stage in whole["stages"]] == ["hangs", "late"]
    assert all("was cut" in stage["ended"] for stage in whole["stages"])


FRAGILE = """
import os, sys
from pathlib import Path
from gpucheck.results import Results, appending
from gpucheck.runner import LINES, NOW, made_by
folder = Path({folder!r})
gone = []
results = Results(
    "s", appending(folder / LINES), made=made_by("s", folder), begin=(folder / NOW).write_text,
    lost=lambda: bool(gone),
)
def act(name):
    (folder / "made").open("a").write(name + " ")
    if name == "loses":
        gone.append(name)
        raise RuntimeError("CUDA error: an illegal memory access")
    if name == "ends":
        os.abort()
    return {{}}
with results.check("the stage itself"):
    for name in ("first", "loses", "second", "ends", "last"):
        results.run(name, act, name)
    if {again}:
        with results.check("always"):
            os.abort()
"""


@pytest.mark.parametrize("again", [False, True])
def test_a_stage_goes_on_behind_a_check_that_ends_its_process(again: bool, tmp_path: Path) -> None:
    """Also where a GPU answers no more; and it ends where each process ends in the same check."""
    code = FRAGILE.format(folder=str(tmp_path), again=again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(metadata.PATHS))
        command = [sys.executable, "-c", code]
        assert not runner.run_stages(tmp_path, lambda _: command, [Stage("s", "", 60, "")])
    whole = json.loads((tmp_path / runner.RESULT).read_text())
    found = [(r["check"], r["ok"]) for r in whole["results"]]
    once = [("first", True), ("loses", False), ("second", True), ("ends", False), ("last", True)]
    (stage,) = whole["stages"]
    if again:
        assert found == [*once, ("always", False)]
        assert (stage["ended"], stage["starts"]) == ("ended with exit status -6", 4)
    else:
        assert found == [*once, ("the stage itself", True)]
        assert (stage["ended"], stage["starts"]) == ("whole", 3)
    assert (tmp_path / "made").read_text().split() == [name for name, _ in once]
    (ended,) = [r for r in whole["results"] if r["check"] == "ends"]
    assert ended["error"] == "its process ended with exit status -6"


def test_a_gpu_that_answers_no_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    FakeCuda(monkeypatch)
    assert not Gpu().lost()
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert Gpu().lost()
    found: list[Values] = []
    results = Results("s", found.append, lost=Gpu().lost)
    with pytest.raises(SystemExit) as ended, results.check("breaks"):
        raise RuntimeError("CUDA error")
    assert ended.value.code == LOST
    assert [r["ok"] for r in found] == [False]
    with results.check("is right"):
        pass


def test_a_line_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text('{"ok": true}\n{"ok": fal')
    assert read(file) == [{"ok": True}]


def test_metadata_of_a_checkout_are_those_of_an_installation(tmp_path: Path) -> None:
    metadata.write_metadata(tmp_path)
    (folder,) = tmp_path.iterdir()
    written = importlib.metadata.Distribution.at(folder)
    there = importlib.metadata.distribution("jackfield")
    assert written.version == there.version == jackfield.__version__
    plugins = {(e.name, e.value) for e in written.entry_points if e.group == "jackfield"}
    assert plugins == {(e.name, e.value) for e in there.entry_points if e.group == "jackfield"}
    assert plugins

    needs = [set(map(Requirement, d.requires or ())) for d in (written, there)]
    # An extra that is made of others is written out by the build, and by pip when it installs.
    made_of_others = {str(r.marker) for r in needs[0] if r.name == "jackfield"}
    assert len(made_of_others) < 4
    ours, theirs = (
        {r for r in each if not any(extra in str(r.marker) for extra in made_of_others)}
        for each in needs
    )
    assert ours == theirs
    assert len(ours) > 20


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metadata.missing()["jackfield"] == []
    assert metadata.lacks("no-such-package>=1")
    assert metadata.lacks(f"jackfield<{jackfield.__version__}")
    assert not metadata.lacks('jackfield>=0.0.1; sys_platform == "linux"')


@pytest.mark.long
def test_the_command_by_itself(tmp_path: Path) -> None:
    """As `make gpu` starts it, on the device that is here."""
    run = [sys.executable, "-m", "gpucheck", "--out", str(tmp_path), "--device", "cpu"]
    own = {**os.environ, "PYTHONPATH": str(metadata.ROOT / "tests/gpu")}
    made = subprocess.run(
        [*run, "--sizes", "tiny", "--only", "machine"], env=own, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    whole = json.loads((tmp_path / runner.RESULT).read_text())
    assert whole["gpu"] == "the CPU"
    assert [stage["ended"] for stage in whole["stages"]] == ["whole"]


def test_without_a_gpu_it_lists_what_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("gpucheck.__main__").main
    assert main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(stage.what in said for stage in STAGES)
    if not torch.cuda.is_available():
        assert main([]) == 0
        assert "torch sees no CUDA GPU, so nothing was run" in capsys.readouterr().out


def test_tests_are_run_in_a_process_and_their_outcomes_told(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_right(capsys): print('heard'); assert capsys.readouterr().out == 'heard\\n'\n"
        "def test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip\ndef test_not(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    found: list[Values] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(existing_tests, "ROOT", tmp_path)
        patch.setenv("PYTHONPATH", os.pathsep.join(metadata.PATHS))
        existing_tests.run_files(tiny(found), [file.name])
        failed, counted = found
        assert failed["check"] == "test_some.py::test_wrong"
        assert counted["ok"] is False
        assert {k: counted[k] for k in ("passed", "failed", "skipped")} == {
            "passed": 1, "failed": 1, "skipped": 1,
        }  # fmt: skip
        with pytest.raises(SkippedError, match="ran no test"):
            existing_tests.run_files(tiny(found), ["no_such_file.py"])


def test_the_tests_that_ask_for_a_gpu_are_found() -> None:
    found = [file.name for file in existing_tests.asking(metadata.ROOT / "tests")]
    assert {"test_compiler_cuda_graph.py", "test_cache_offloaded.py"} <= set(found)
    assert Path(__file__).name not in found
    assert set(found[-2:]) == {"test_attention_triton.py", "test_recorded_steps.py"}


def test_the_page_is_the_one_of_the_run_that_is_kept() -> None:
    kept = json.loads(page.KEPT.read_text()) if page.KEPT.exists() else None
    assert page.PAGE.read_text() == page.page(kept)


def test_a_page_shows_aims_figures_and_what_went_wrong() -> None:
    results = [
        {"stage": "machine", "check": "gpu", "ok": True, "name": "a GPU", "memory": 9},
        {"stage": "kernels", "check": "attention x", "ok": False, "error": "E: illegal"},
        {"stage": "engines", "check": "bnb", "ok": None, "reason": "not there"},
        {"stage": "decode-1", "check": "paged", "ok": True, "tokens_per_second": 12.5,
         "share_of_bandwidth": 0.81, "aim": "share_of_bandwidth at least 0.8", "met": True,
         "profile": {"seconds": 1}},
    ]  # fmt: skip
    stages = [{"stage": "machine", "ended": "whole", "seconds": 3.0}]
    text = page.page({"gpu": "a GPU", "date": "2026-01-01", "stages": stages, "results": results})
    assert "## a GPU, 2026-01-01" in text
    assert "| `decode-1` | paged | share_of_bandwidth at least 0.8 | yes |" in text
    assert "| paged | 12.5 | 0.81 |" in text
    assert "- `kernels`, attention x: E: illegal" in text
    assert "- `engines`, bnb: not there" in text
    assert "No GPU has run it" not in text


def test_what_a_gpu_is_given_can_be_made() -> None:
    """8 billion parameters, prompts of 2k and 32k, a dozen families, batches of 1 and 32."""
    assert all(case.config() for case in kernels.cases(Bench(Host(), GPU, Results("", print))))
    assert all(config_of(family) for family in GPU.families)
    assert LlamaConfig(**GPU.counted)
    with torch.device("meta"), contextlib.suppress(ValueError):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**GPU.large))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(8.03e9, rel=0.01)
    assert GPU.prefills == (2048, 32768)
    assert len(GPU.families) >= 12
    assert GPU.batch == 32
