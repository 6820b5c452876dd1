"""The sweep over all causal types: a few of them here, all of them where it is long."""

from __future__ import annotations

import re

import pytest
import sweep
import torch
import zoo
from families import prompts

from jackfield.bridge.batch_trial import Trial


@pytest.mark.parametrize("model_type", ["doge", "hy_v4", "minimax_m3_vl_text", "llama4_text"])
@pytest.mark.one_in(4)
def test_what_reads_columns_is_equal_or_refused(model_type: str) -> None:
    row = sweep.of_type(model_type)
    assert sweep.wrong([row]) == []
    assert row["cells"]["auto, auto"] == row["cells"]["dynamic, eager"] == "equal"


def test_a_wrong_cell_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the trial, a row that is padded says something else."""
    monkeypatch.setattr("jackfield.bridge.requirements.tried", lambda *_: Trial())
    model, wanted = sweep._reference("hy_v4")
    outcome = sweep.cell(model, wanted, "dynamic", "eager")
    assert outcome.startswith("WRONG: a ragged batch in chunks of all")


def test_what_was_tried_has_the_figures_of_the_page_that_the_sweep_writes() -> None:
    figures = re.search(
        r"(\d+) were built and (\d+) of these run.* Of (\d+) cells, (\d+) are equal, "
        r"(\d+) are refused and (\d+) are WRONG",
        sweep.PAGE.read_text(),
    )
    assert figures is not None
    told = "({} types built, {} of them run) | {} | {} | {} | {} |".format(*figures.groups())
    assert told in (sweep.PAGE.parent / "hardening.md").read_text()


def test_the_recipe_builds_at_least_ninety_types() -> None:
    built = 0
    for model_type in zoo.TYPES:
        try:
            with torch.device("meta"):
                zoo.config_of(model_type)
        except Exception:  # noqa: BLE001 - any config's code
            continue
        built += 1
    assert built >= 150


def test_windows_and_sparse_attention_are_smaller_than_the_prompts() -> None:
    assert max(zoo.WINDOW, zoo.SPARSE) < max(sweep.LENGTHS)
    assert zoo.config_of("mistral").sliding_window == zoo.WINDOW
    assert zoo.config_of("doge").keep_window_size == zoo.SPARSE
    assert [len(prompt) for prompt in prompts(sweep.LENGTHS)] == list(sweep.LENGTHS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_type_has_a_third_outcome() -> None:
    rows = sweep.run(zoo.TYPES, None)
    assert sweep.wrong(rows) == []
    assert sum("equal" in row["cells"].values() for row in rows) >= 90
