"""What can be tried is what the plan's verdicts allow; a profile says all of what was chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import jackfield
from jackfield.api import prepare
from jackfield.benchmarking.verdicts import Change
from jackfield.benchmarking.workload import Request, Workload
from jackfield.planning.profile_files import read_profile
from jackfield.planning.toml_text import toml
from jackfield.planning.verdicts import PlanSpec, explain
from jackfield.tuning import registered
from jackfield.tuning.candidates import RUNGS, Candidate, Quality
from jackfield.tuning.outcome import Outcome, Tried
from jackfield.tuning.page import html
from jackfield.tuning.registered import RegisteredLadder
from jackfield.tuning.writing import HEAD, pinned, profile_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a CPU")

WORK = Workload("eight", tuple(Request(tuple(range(5, 105)), 8) for _ in range(8)), 8)


def ladder(fixed: dict[str, Any] | None = None, *, quantize: bool = False) -> RegisteredLadder:
    return RegisteredLadder("demo", fixed or {}, WORK, quantize=quantize)


@pytest.mark.long
def test_every_rung_has_what_can_run_and_why_the_rest_cannot() -> None:
    verdicts = explain("demo", PlanSpec()).verdicts
    one = ladder(quantize=True)
    for rung, kind in registered.KINDS.items():
        found = one.rung(rung, {})
        labels = {candidate.label for candidate in found.candidates}
        assert labels >= {v.name for v in verdicts if (v.kind, v.verdict) == (kind, "possible")}
        for candidate in found.candidates:
            plan = prepare("demo", **candidate.arguments).plan
            assert plan[kind].registered.name == candidate.label
        assert all(dropped.reason for dropped in found.dropped)
        assert {d.label for d in found.dropped} | labels | {found.now} == {
            v.name for v in verdicts if v.kind == kind
        }
    dropped = {d.label: d.reason for d in ladder().rung("attention", {}).dropped}
    assert "needs a CUDA GPU" in dropped["flash_attention_2"]
    assert {c.label for c in one.rung("precision", {}).candidates} == {"bfloat16", "float16"}
    assert one.rung("placement", {}).candidates == []


def test_what_does_not_go_with_the_best_is_tried_beside_auto() -> None:
    """`flex_attention` needs padded rows, which the best cache has not."""
    best = {"cache_implementation": "paged", "dtype": "bfloat16"}
    found = ladder().rung("attention", best)
    (flex,) = [c for c in found.candidates if c.label == "flex_attention"]
    assert flex.arguments == {"attn_implementation": "flex_attention", "dtype": "bfloat16"}
    fixed = {"cache_implementation": "paged"}
    assert "flex_attention" in {d.label for d in ladder(fixed).rung("attention", fixed).dropped}


def test_nothing_is_measured_twice() -> None:
    one = ladder()
    first = {c.label for c in one.rung("cache", {}).candidates}
    assert first
    assert not one.rung("cache", {}).candidates


@pytest.mark.parametrize(
    ("rung", "fixed"),
    [
        ("attention", {"attn_implementation": "sdpa"}),
        ("cache", {"cache_implementation": "static"}),
        ("compile", {"compile": "none"}),
        ("precision", {"dtype": "float32"}),
        ("placement", {"device_map": "cpu"}),
    ],
)
def test_what_is_named_is_not_tried(rung: str, fixed: dict[str, Any]) -> None:
    found = ladder(fixed).rung(rung, fixed)
    assert (list(found.candidates), found.why_none) == ([], "as you named it")


def test_weights_are_quantized_on_request_only() -> None:
    assert ladder().rung("quantize", {}).why_none == "weights are quantized with --quantize only"
    assert ladder(quantize=True).rung("quantize", {}).candidates


def test_batches_are_those_that_the_workload_can_fill() -> None:
    labels = [c.label for c in ladder().rung("batch", {}).candidates]
    assert labels == [
        "2 at a time",
        "4 at a time",
        "prompts in pieces of 64",
        "steps of 512 tokens",
    ]
    fixed = {"max_batch_size": 8, "prefill_chunk_size": 32}
    assert not ladder(fixed).rung("batch", fixed).candidates


def test_memory_prunes(monkeypatch: pytest.MonkeyPatch) -> None:
    one, candidate = ladder(), Candidate("attention", "sdpa", {"attn_implementation": "sdpa"})
    assert one.prune(candidate, {}, 1.0, 0) is None
    monkeypatch.setattr(registered, "free_bytes", lambda device: 30_000_000)
    assert one.prune(candidate, {}, 1.0, 0) is None
    why = one.prune(candidate, {}, 1.0, 1)
    assert why is not None
    assert "needs 39.7 MB with those beside it" in why
    assert "30.0 MB are free" in why


def test_the_roof_prunes_where_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    least = {"sdpa": 2.0, None: 0.5}

    def limits(requests: Any, arguments: Any, batch: int, rates: Any) -> dict[str, Any]:
        seconds = least[arguments.get("attn_implementation")]
        return {"where": "cpu", "bandwidth": 1.0, "flop_rate": 1.0, "seconds": seconds}

    monkeypatch.setattr(registered, "limits", limits)
    one, candidate = ladder(), Candidate("attention", "sdpa", {"attn_implementation": "sdpa"})
    assert one.prune(candidate, {}, 1.0, 0) is None, "weights that fit into a processor's caches"
    monkeypatch.setattr(registered, "CACHED", 0)
    why = one.prune(candidate, {}, 1.0, 0)
    assert why == "its roof is 2 s a round, and the best takes 1 s"
    assert one.prune(candidate, {}, 3.0, 0) is None
    assert one.prune(candidate, {}, 0.4, 0) is None, "the best is above its own roof"


CHOSEN = {
    "attn_implementation": "sdpa", "cache_implementation": "paged?page_size=32",
    "dtype": "bfloat16", "max_batch_size": 4, "scheduler": "short-first",
}  # fmt: skip


def outcome() -> Outcome:
    change = Change(0.5, 0.4, 0.6, 6)
    tried = [
        Tried("cache", "offloaded", "refused: there is no second device"),
        Tried(
            "precision", "bfloat16", "taken", CHOSEN, [1.0, 2.0, 3.0], change, 10**7, Quality(9.0)
        ),
        Tried("attention", "eager <b>", "failed: x", {"attn_implementation": "eager"}),
        Tried("auto", "auto", "auto", {}, [2.0, 4.0], None, 2 * 10**7, Quality(9.0, 3, 4)),
    ]
    return Outcome(CHOSEN, tried, change, True)


def test_a_profile_pins_what_the_plan_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = profile_of("demo", outcome(), WORK, 60.0)
    assert content["selections"] == {
        "attn_implementation": "sdpa", "cache_implementation": "paged?page_size=32",
        "compile": "none", "quantization": "none", "scheduler": "short-first",
        "dtype": "bfloat16", "device_map": "cpu", "max_batch_size": 4,
    }  # fmt: skip
    file = tmp_path / "p.toml"
    file.write_text(toml(content, HEAD))
    plan = jackfield.plan("demo", profile=file)
    again = prepare("demo", **CHOSEN).plan
    assert {k: c.to_dict() | {"how": ""} for k, c in plan.choices.items()} == {
        k: c.to_dict() | {"how": ""} for k, c in again.choices.items()
    }
    assert caplog.records == [], "here everything is as it was"
    evidence = read_profile(file).evidence
    assert [row["label"] for row in evidence] == ["offloaded", "bfloat16", "eager <b>", "auto"]
    assert evidence[1]["tokens_per_second"] == WORK.new_tokens / 2.0
    assert evidence[1]["ratio_high"] == 0.6
    assert (evidence[3]["right_answers"], evidence[3]["answers"]) == (3, 4)


@pytest.mark.parametrize("name", ["attn_implementation", "cache_implementation", "compile"])
def test_every_backend_that_can_run_is_pinned_as_it_is(name: str) -> None:
    kind = {"compile": "compiler"}.get(name, name.partition("_")[0].replace("attn", "attention"))
    for verdict in explain("demo", PlanSpec()).verdicts:
        if verdict.kind == kind and verdict.verdict == "possible":
            plan = prepare("demo", **{name: verdict.name}).plan
            assert pinned(plan, {})[name] == verdict.name


def test_the_page_has_every_row_and_runs_nothing(tmp_path: Path) -> None:
    text = html(profile_of("demo", outcome(), WORK, 60.0))
    for said in ("bfloat16", "offloaded", "there is no second device", "Speed against perplexity"):
        assert said in text
    assert "eager &lt;b&gt;" in text
    assert "<script" not in text
    assert "{%" not in text


def test_a_perplexity_without_end_is_on_no_plot() -> None:
    content = profile_of("demo", outcome(), WORK, 60.0)
    for one in content["evidence"]:
        one["perplexity"] = math.inf if one["perplexity"] else one["perplexity"]
    assert "Speed against perplexity" not in html(content)
    assert "Speed against peak" in html(content)


def test_a_profile_with_bounds_on_memory_names_no_device() -> None:
    bounds = {"max_memory": {"cpu": "4GB", "disk": "10GB"}}
    found = pinned(prepare("demo", **bounds).plan, bounds)
    assert "device_map" not in found
    named = {name: value for name, value in found.items() if name not in bounds}
    assert prepare("demo", **named, **bounds).plan.device == "cpu"


def test_the_rungs_are_the_ladder() -> None:
    one = ladder()
    for rung in RUNGS:
        assert one.rung(rung, {}).now


def test_the_last_race_is_in_the_profile_and_on_the_page() -> None:
    content = profile_of("demo", outcome(), WORK, 60.0)
    assert content["made"]["beside_auto"] == {
        "ratio": 0.5, "low": 0.4, "high": 0.6, "rounds": 6, "verdict": "faster for certain",
    }  # fmt: skip
    said = "the best takes 0.50 times as long (0.40 to 0.60), in 6 rounds: faster for certain."
    assert said in html(content)
    few = replace(outcome(), change=Change(0.9, 0.0, math.inf, 3), unreached=("cache", "batch"))
    content = profile_of("demo", few, WORK, 60.0)
    assert content["made"]["beside_auto"]["low"] is None
    assert content["made"]["beside_auto"]["verdict"] == "not faster for certain"
    assert content["made"]["unreached"] == ["cache", "batch"]
    assert "There was no time for cache, batch." in html(content)
    assert "beside_auto" not in toml(profile_of("demo", replace(few, change=None), WORK, 60.0))


@pytest.mark.parametrize(
    "given", [{"decoding": "assisted", "assistant_model": "demo-draft"}, {"deterministic": True}]
)
def test_what_was_measured_and_cannot_be_selected_is_said(
    given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = profile_of("demo", Outcome(given, [], None, True), WORK, 1.0)
    assert content["made"]["named"] == given
    assert "decoding" not in content["selections"]
    (file := tmp_path / "p.toml").write_text(toml(content, HEAD))
    jackfield.plan("demo", profile=file)
    for name, value in given.items():
        assert f"measured with {name}={value!r}, which you have to name yourself" in caplog.text
    caplog.clear()
    jackfield.plan("demo", profile=file, **given)
    assert caplog.records == []


@pytest.mark.skipif(find_spec("gptqmodel") is None, reason="needs jackfield[gptq]")
def test_what_no_profile_may_name_is_written_beside(tmp_path: Path) -> None:
    given = {"quantization": f"gptq?bits=8&calibration={Path(__file__)}"}
    content = profile_of("demo", Outcome(given, [], None, True), WORK, 1.0)
    assert list(content["made"]["named"]) == ["quantization"]
    (tmp_path / "p.toml").write_text(toml(content))
    found = read_profile(tmp_path / "p.toml")
    assert "quantization" not in found.selections
    assert "calibration=" in found.made["named"]["quantization"]
