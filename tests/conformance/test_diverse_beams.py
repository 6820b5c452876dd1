"""Diverse beams say what a plain reading of the paper says, and plain beam search at its ends."""

from __future__ import annotations

from typing import Any

import pytest
from beams import BOTH, COUNT, ENDS, LENGTHS, assert_same, diverse, model_of, references, texts
from drafting import repetitive
from driven import Arrival, drive
from families import WINDOW, prompts

import jackfield

ASKED: list[dict[str, Any]] = [
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "num_return_sequences": 4},
    {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 1.5, "num_return_sequences": 3,
     "eos_token_id": ENDS},
    {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 0.2, "num_return_sequences": 5,
     "eos_token_id": ENDS, "length_penalty": -1.0},
    {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 30.0, "num_return_sequences": 6,
     "eos_token_id": ENDS[:3], "length_penalty": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED, ids=repr)
@pytest.mark.one_in(4)
def test_texts_and_scores_are_those_of_the_paper(asked: dict[str, Any]) -> None:
    """Four prompts together, in both layouts; preempted ones too, in a small pool."""
    expected = [one for prompt in prompts(LENGTHS) for one in diverse("llama", prompt, **asked)]
    for cache in ("paged?page_size=4", "dynamic"):
        with jackfield.load(model_of("llama"), decoding=BOTH, cache_implementation=cache) as engine:
            found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT, **asked)
        assert_same(texts(found), expected)


@pytest.mark.parametrize("groups", [2, 3])
def test_groups_that_hardly_cost_each_other_are_plain_searches(groups: int) -> None:
    asked: dict[str, Any] = {"num_return_sequences": 2 * groups, "eos_token_id": ENDS}
    with jackfield.load(model_of("llama"), decoding="beam") as engine:
        found = engine.generate(
            prompts(LENGTHS), num_beams=2 * groups, num_beam_groups=groups,
            diversity_penalty=1e-9, max_new_tokens=COUNT, **asked,
        )  # fmt: skip
    expected = references("llama", num_beams=2, num_return_sequences=2, eos_token_id=ENDS)
    assert_same(texts(found), [one for best, second in expected for one in
                        [best] * groups + [second] * groups])  # fmt: skip


def test_groups_that_cost_each_other_much_begin_differently() -> None:
    with jackfield.load(model_of("llama"), decoding="beam") as engine:
        found = engine.generate(
            prompts(LENGTHS)[0], num_beams=5, num_beam_groups=5, diversity_penalty=1e3,
            num_return_sequences=5, max_new_tokens=COUNT,
        )  # fmt: skip
        assert len(engine._loop.decoding.strategies["beam"]._search._known) == 0
    said = [one.token_ids for one in found]
    assert all(len(set(column)) == 5 for column in zip(*said, strict=True))


def test_preemptions_and_neighbours_change_nothing() -> None:
    everyone = repetitive(9, WINDOW)
    arrivals = [
        Arrival(n // 2, text, max_new_tokens=COUNT, **(ASKED[1] if n % 3 else {"num_beams": 3}))
        for n, text in enumerate(everyone)
    ]
    with jackfield.load(
        model_of("llama"), decoding=BOTH, cache_implementation="paged?page_size=4&num_tokens=96"
    ) as engine:
        found = drive(engine, arrivals)
        assert engine.statistics().preemptions > 0
        assert engine.statistics().cache.pages_used == 0
        for n, text in enumerate(everyone):
            if n % 3:
                assert_same(texts(found[n]), diverse("llama", text, **ASKED[1]))
            else:
                alone = engine.generate(text, num_beams=3, max_new_tokens=COUNT)
                assert_same(texts(found[n]), texts(alone))


def test_a_structure_holds_in_every_group() -> None:
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    words = ["yes", "no", "perhaps", "nobody knows"]
    with jackfield.load("demo", dtype="float32", decoding="beam") as engine:
        found = engine.generate(
            "Is it?", choices=words, num_beams=4, num_beam_groups=4, diversity_penalty=50.0,
            num_return_sequences=3,
        )  # fmt: skip
    assert {one.text for one in found} <= set(words)
    assert len({one.text for one in found}) > 1
