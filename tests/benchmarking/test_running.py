"""Whole benchmarks of the demo model, in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jackfield.benchmarking import running
from jackfield.benchmarking.contenders import Contender, product, rival
from jackfield.benchmarking.preparing import reader
from jackfield.benchmarking.results import Benchmark
from jackfield.benchmarking.running import bench
from jackfield.benchmarking.verdicts import Verdict
from jackfield.benchmarking.workload import Shape, Workload, preset
from jackfield.errors import CheckpointError, PlanError, SelectionError, UsageError

if TYPE_CHECKING:
    from conftest import Liars

pytestmark = pytest.mark.usefixtures("here")

MODEL = {"model": "demo", "dtype": "float32"}


def workload(**shape: Any) -> Workload:
    asked = Shape(**{"requests": 2, "prompt_tokens": 12, "new_tokens": 6, **shape})
    return preset("chat", asked, *reader(Contender("demo", MODEL)))


def measured(*names: str, rivals: tuple[str, ...] = (), **given: Any) -> Benchmark:
    rows = product({"attention": names}, {**MODEL, "cache_implementation": "dynamic"})
    rows += [rival(name, MODEL) for name in rivals]
    shape = given.pop("shape", {})
    return bench(rows, workload(**shape), **{"rounds": 3, **given})


def test_rows_are_measured_in_turn_and_judged() -> None:
    seen = []
    found = measured("sdpa", "eager", rivals=("generate",), progress=lambda *at: seen.append(at))
    assert [row.reasons for row in found.rows] == [(), (), ()]
    assert {len(row.rounds) for row in found.rows} == {3}
    for row in found.rows:
        assert row.parity is not None
        assert row.parity["worst"] <= row.parity["allowed"]
        assert (row.parity["texts"], row.parity["lossy"]) == (2, False)
        assert row.seconds > 0
        assert row.middle("first") is not None
        assert 0 < row.middle("per_token") < row.seconds  # type: ignore[operator]
        assert row.weight_bytes is not None
        assert row.weight_bytes > 3e6
    reports = [row.report for row in found.rows]
    assert [r and r["attention"]["name"] for r in reports] == ["sdpa", "eager", None]
    assert reports[0]["attention"]["calls"] == 3 * 6 * 8  # type: ignore[index]
    assert seen[0] == (0, 18)
    assert seen[-1] == (18, 18)
    assert found.base == "sdpa"
    assert found.change(found["sdpa"]) is None
    change = found.change(found["eager"])
    assert change is not None
    assert change.ratio == pytest.approx(found["eager"].seconds / found["sdpa"].seconds, rel=1)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["rows"][1]["change"]["rounds"] == 3
    assert told["rows"][0]["figures"]["tokens_per_second"] > 0
    assert told["surroundings"]["versions"]["torch"]


@pytest.mark.usefixtures("with_limits")
def test_the_roof_is_what_must_be_read_and_multiplied() -> None:
    (row,) = measured("sdpa", rounds=1).rows
    assert row.limits is not None
    assert row.limits["where"] == "cpu float32"
    parameters = row.weight_bytes // 4  # type: ignore[operator]
    # six steps at least; 17 tokens of each of two requests, a multiplication and an addition each
    assert row.limits["bytes_read"] == pytest.approx(6 * 4 * parameters, rel=0.2)
    assert row.limits["flops"] == pytest.approx(2 * 17 * 2 * parameters, rel=0.2)
    assert row.shares is not None
    assert row.limits["seconds"] == pytest.approx(max(row.shares) * row.seconds)


def test_pages_of_an_earlier_round_are_not_found_again() -> None:
    rows = product({"cache": ["paged"]}, MODEL)
    found = bench(rows, workload(prompt_tokens=200), rounds=3)
    assert found.rows[0].valid
    attention = found.rows[0].report["attention"]  # type: ignore[index]
    assert set(attention["prefill"].values()) == {3}


def test_requests_arrive_at_their_times() -> None:
    found = measured("sdpa", shape={"requests": 3, "rate": 20.0}, rivals=("generate_batch",))
    late = workload(requests=3, rate=20.0).requests[-1].arrival
    assert [row.reasons for row in found.rows] == [(), ()]
    for row in found.rows:
        assert min(row.times) >= late
    assert found.rows[1].middle("first") is None


@pytest.mark.long
def test_generate_batches_and_says_when_tokens_came() -> None:
    found = measured("sdpa", rivals=("generate",), shape={"requests": 5, "batch": 2})
    assert [row.reasons for row in found.rows] == [(), ()]
    one = found.rows[1].rounds[0]
    assert one.first is not None
    assert one.first < one.seconds


def test_a_rival_refuses_what_it_cannot_do() -> None:
    found = measured("sdpa", rivals=("generate",), shape={"rate": 50.0}, rounds=1)
    assert found.rows[0].valid
    (why,) = found.rows[1].reasons
    assert why.startswith("refused: generate takes all requests at once")


def test_a_plan_that_cannot_be_is_a_row_with_its_reason() -> None:
    rows = product({"attention": ["metal_flash_sdpa"]}, MODEL)
    found = bench([*product({}, MODEL), *rows], workload(), rounds=1)
    assert found.rows[0].valid
    assert found.rows[1].reasons[0].startswith("refused: ")
    assert not found.rows[1].measured
    assert found.change(found.rows[1]) is None
    with pytest.raises(PlanError):
        bench(rows, workload(), rounds=1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"attn_implementation": "nope"}, SelectionError),
        ({"model": "./nowhere"}, CheckpointError),
        ({"decoding": "beam"}, UsageError),
    ],
)
def test_what_is_wrong_for_all_is_an_error(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        bench([Contender("x", {**MODEL, **arguments})], workload(), rounds=1)


def test_models_that_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "free_bytes", lambda device: 20_000_000)
    with pytest.raises(UsageError, match=r"all rows take 2\d\.\d MB of cpu .* 20\.0 MB are free"):
        measured("sdpa", "eager")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": 0}, "rounds must be a whole number"),
        ({"margin": 0.0}, "margin must be above 0"),
        ({"base": "nope"}, "no row 'nope' to compare with"),
    ],
)
def test_what_is_asked_of_a_benchmark_is_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measured("sdpa", **given)
    with pytest.raises(UsageError, match="nothing to measure"):
        bench([], workload())


@pytest.mark.long
def test_a_backend_that_rounds_is_held_to_what_it_may_lose() -> None:
    rows = product({"quantizer": ["none", "int8-cpu"]}, MODEL)
    found = bench(rows, workload(new_tokens=24), rounds=1)
    assert [row.reasons for row in found.rows] == [(), ()]
    (_, lossy) = found.rows
    assert lossy.parity is not None
    assert lossy.weight_bytes < found.rows[0].weight_bytes  # type: ignore[operator]


@pytest.mark.long
def test_wrong_tokens_are_no_result(liars: Liars) -> None:
    liars("wrong")
    found = measured("sdpa", "wrong", rounds=4)
    assert found.rows[0].valid
    (why,) = found.rows[1].reasons
    assert "wrong tokens" in why


@pytest.mark.usefixtures("with_operators")
@pytest.mark.long
def test_what_only_calls_another_is_no_result(liars: Liars) -> None:
    liars("inside")
    found = measured("inside", "sdpa", "eager", rounds=1)
    assert [row.label for row in found.rows if row.valid] == ["sdpa", "eager"]
    assert "attention inside called what sdpa does" in found.rows[0].reasons[0]


def test_what_ends_early_is_no_result(liars: Liars, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackfield.engine.sequences import RunningSequence

    monkeypatch.setattr(RunningSequence, "_finishes", RunningSequence._finishes)  # given back
    liars("early")
    found = measured("early", rounds=1)
    assert found.rows[0].reasons == ("request 1 got 3 tokens and asked for 6",)


@pytest.mark.long
def test_the_python_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "bench.md", "exec"), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out.strip() in list(Verdict)
