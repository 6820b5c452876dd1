"""What a report, texts and operators must say for a row to be a result."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.benchmarking.contenders import OURS
from jackfield.benchmarking.observed import reasons_against
from jackfield.benchmarking.operators import alike
from jackfield.benchmarking.parity import LOSSY, reason_against
from jackfield.benchmarking.results import Row

GOOD: dict[str, Any] = {
    "attention": {
        "name": "sdpa", "calls": 12, "prefill": {"0": 2, "1": 2}, "decode": {"0": 4, "1": 4},
    },
    "cache": {"name": "paged", "calls": 6},
    "compiler": {"name": "none", "calls": 6},
}  # fmt: skip
ASKED = {"attention": "plugin:sdpa", "cache": "paged?page_size=16", "kernel": "cpu-rms-norm"}


def test_what_was_asked_for_and_ran_is_fine() -> None:
    assert reasons_against(ASKED, GOOD) == []
    assert reasons_against({}, {}) == []


@pytest.mark.parametrize(
    ("kind", "seen", "words"),
    [
        ("attention", {"name": "eager", "calls": 3}, "attention eager ran, and sdpa was asked for"),
        ("attention", {"name": "sdpa", "calls": 0}, "attention sdpa was never called"),
        ("cache", {"name": "paged", "calls": 0}, "cache paged was never called"),
        ("cache", None, "nothing was observed of a cache, and paged was asked for"),
        ("attention", {"name": "sdpa", "calls": 7, "prefill": {}, "decode": {"0": 4, "1": 3}},
         "attention sdpa was called 3 times in layer 1 (decode), and 4 times in others"),
    ],
)  # fmt: skip
def test_what_did_not_run_is_named(kind: str, seen: Any, words: str) -> None:
    report = {**GOOD, kind: seen}
    assert reasons_against(ASKED, report) == [words]


def regret(worst: float, mean: float = 0.0, rounding: float = 0.0) -> dict[str, float]:
    return {"worst": worst, "mean": mean, "rounding": rounding}


def test_tokens_may_be_as_far_off_as_rounding_goes() -> None:
    assert reason_against([regret(0.0), regret(0.001)], lossy=False) is None
    assert reason_against([regret(0.2, rounding=0.1)], lossy=False) is None
    why = reason_against([regret(0.0), regret(0.4, rounding=0.1)], lossy=False)
    assert why is not None
    assert why.startswith("wrong tokens in 1 of 2 texts: up to 0.4 spreads")
    assert reason_against([regret(float("nan"))], lossy=False) is not None


def test_what_rounds_on_purpose_must_choose_among_the_best() -> None:
    assert reason_against([regret(3.0, LOSSY - 0.1)], lossy=True) is None
    for mean in (LOSSY + 0.1, float("nan")):
        assert "on average" in str(reason_against([regret(3.0, mean)], lossy=True))


def row(
    label: str,
    attention: str,
    distribution: str,
    cache: str = "paged",
    how: str = "named",
    **more: Any,
) -> Row:
    chosen = {
        "attention": {"name": attention, "distribution": distribution, "how": how},
        "cache": {"name": cache, "distribution": "jackfield", "how": "auto"},
    }
    plan = {"chosen": chosen, "dtype": "float32", "device": "cpu", "kernels": []}
    return Row(label, OURS, {}, plan=plan, operators={"aten::mm": 4}, **more)


def test_the_same_operators_are_the_same_attention() -> None:
    mine, theirs = row("mine", "mine", "my-package"), row("sdpa", "sdpa", "jackfield")
    assert set(alike([theirs, mine])) == set(alike([mine, theirs])) == {"mine"}
    assert "row sdpa" in alike([mine, theirs])["mine"]


@pytest.mark.parametrize(
    "other",
    [
        row("sdpa", "sdpa", "jackfield", cache="dynamic"),
        row("the same again", "mine", "my-package"),
        row("what auto chose", "mine", "my-package", how="auto"),
        row("p.toml", "mine", "my-package", how="from profile p.toml"),
        row("sdpa", "sdpa", "jackfield", reasons=("it failed",)),
        Row("generate", "generate", {}),
        Row("other", OURS, {}, plan=row("", "", "").plan, operators={"aten::mm": 5}),
        Row("other", OURS, {}, plan=row("", "", "").plan),
    ],
    ids=lambda other: f"{other.label} {other.operators}",
)
def test_other_rows_say_nothing(other: Row) -> None:
    assert alike([row("mine", "mine", "my-package"), other]) == {}
