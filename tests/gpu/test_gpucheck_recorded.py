"""What `make gpu` does with recorded steps, on tapes: on a processor its stages skip all of it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import extras
import pytest
from gpucheck import counters, decode_one, engines
from gpucheck.bench import Bench, Host
from gpucheck.results import Results, Values
from gpucheck.sizes import TINY
from tape import Tapes, launching, record_on

#: The checks of each stage that record.
RECORDED = {
    "engines": {
        "paged, triton, cuda_graph", "paged, triton, cuda_graph between",
        "paged, triton, cuda_graph, fused", "paged, triton, cuda_graph, drafts",
        "static, sdpa, cuda_graph", "dynamic, sdpa, cuda_graph",
    },
    "counters": {
        f"{what}: {label}"
        for what in ("waits a step", "compilations after warm-up")
        for label, arguments in counters.ENGINES.items()
        if "cuda_graph" in arguments.get("compile", "")
    },
    "decode_one": {
        decode_one.WHOLE, f"{decode_one.WHOLE}: texts", f"{decode_one.WHOLE}: profile",
        decode_one.FUSED, f"{decode_one.FUSED}: texts", "static, sdpa, cuda_graph between",
    },
    "decode_many": {decode_one.WHOLE, f"{decode_one.WHOLE}, against generate_batch"},
}  # fmt: skip


class Whole(Tapes):
    changes = True


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda_graph` and Triton's kernels, as far as a processor has them."""
    extras.needs("triton")
    from jackfield_plugins.attention.triton import variants

    if not variants.interpreted():
        pytest.skip("kernels are compiled here, for a GPU")
    monkeypatch.setattr(variants, "ready", launching(variants.ready))
    monkeypatch.setattr(variants, "overlapping", launching(variants.overlapping))
    record_on(monkeypatch, Whole)


@pytest.mark.usefixtures("recording")
@pytest.mark.long
@pytest.mark.parametrize("stage", RECORDED)
def test_a_stage_is_right_where_steps_are_recorded(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = importlib.import_module(f"gpucheck.{stage}")
    if hasattr(module, "RUNS"):  # the others run without a recording, in the test of all stages
        only(monkeypatch, module, "RUNS", lambda run: "compile" in run.load)
        for name in ("swapped", "placements", "quantizers"):
            monkeypatch.setattr(module, name, lambda *_: {})
    found: list[Values] = []
    module.run(Bench(Host(), TINY, Results(stage, found.append)))
    assert [record for record in found if record["ok"] is False] == []
    assert {record["check"] for record in found if record["ok"]} >= RECORDED[stage]
    played = [r["compiled"] for r in found if r["check"] == decode_one.WHOLE]
    assert all(re.search(r"\b[1-9]\d* steps played whole", said) for said in played)


@pytest.mark.usefixtures("recording")
def test_an_engine_whose_steps_are_recorded_is_judged() -> None:
    recorded = next(run for run in engines.RUNS if run.load["compile"] == "cuda_graph")
    alone = replace(recorded, load={**recorded.load, "max_batch_size": 1})
    bench = Bench(Host(), replace(TINY, prompts=(3,)), Results("engines", print))
    found = engines.judged(bench, alone)
    assert found["ok"]
    assert "4 steps played whole (of 1 rows)" in found["compiled"]


def only(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, which: Callable[[Any], bool]
) -> None:
    monkeypatch.setattr(module, name, tuple(filter(which, getattr(module, name))))
