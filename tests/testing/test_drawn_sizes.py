"""Sizes that the checks of attentions and compilers draw: of each range some, by the seed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from attention import FEATURES, of

from jackfield.testing.attention import drawn
from jackfield.testing.attention.cuts import MISTAKES as CUTS
from jackfield.testing.attention.faults import MISTAKES
from jackfield.testing.attention.steps import SITUATIONS
from jackfield.testing.compiler import varied
from jackfield.testing.subject import Subject, uninstalled


@pytest.fixture(params=range(6))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def subject_with(seed: int, **capabilities: Any) -> Subject:
    with uninstalled(of(**capabilities)()) as subject:
        return dataclasses.replace(subject, seed=seed)


def test_heads_are_many_and_in_groups_of_every_size(seed: int) -> None:
    found = drawn.heads(subject_with(seed))
    groups = {queries // keys for queries, keys in found}
    assert groups >= {1, 3, 5, 6, 7, 8}
    assert any(16 < queries < 32 for queries, _ in found)
    assert any(queries > 64 for queries, _ in found)
    assert all(queries % keys == 0 for queries, keys in found)
    assert any(keys > 1 and queries // keys > 8 for queries, keys in found)


def test_no_groups_where_none_are_declared(seed: int) -> None:
    subject = subject_with(seed, features=FEATURES - {"grouped_query"})
    assert all(queries == keys for queries, keys in drawn.heads(subject))


def test_sizes_of_heads_are_those_that_are_declared(seed: int) -> None:
    every = frozenset(range(16, 257, 2))
    assert drawn.head_sizes(subject_with(seed, head_dims=frozenset({12, 96, 192}))) == [12, 96, 192]
    some = drawn.head_sizes(subject_with(seed, head_dims=every))
    assert set(some) <= every
    assert {16, 64, 80, 96, 112, 128, 160, 192, 256} <= set(some)
    assert drawn.head_size(subject_with(seed, head_dims=frozenset({96}))) == 96
    assert {96, 192} <= set(drawn.head_sizes(subject_with(seed)))


def test_windows_end_before_their_prompts_do(seed: int) -> None:
    found = drawn.windows(subject_with(seed))
    assert all(tokens - window >= 40 for window, tokens in found)
    assert found[0][0] <= 16
    assert any(512 < window <= drawn.SHORT for window, _ in found)


def test_another_seed_is_another_draw() -> None:
    draws = [str(drawn.heads(subject_with(seed))) for seed in range(5)]
    assert len(set(draws)) == 5
    assert draws[0] == str(drawn.heads(subject_with(0)))


def test_one_shape_of_each_range_comes_first(seed: int) -> None:
    shapes = list(varied._shapes(subject_with(seed).random("sizes")))
    first = shapes[: 2 * len(varied.RANGES)]
    for sizes in varied.RANGES:
        assert any(rows in sizes and width == 1 for rows, width, _ in first)
        assert any(width in sizes and rows == 1 for rows, width, _ in first)
    everything = range(1, varied.MOST + 1)
    assert {rows for rows, width, _ in shapes if width == 1} >= set(everything)
    assert {width for rows, width, _ in shapes if rows == 1} >= set(everything)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_two_sequences_of_one_length_are_in_every_situation(situation: str) -> None:
    steps = SITUATIONS[situation]
    assert any(len({tokens for _, tokens in s.sizes}) < len(s.sizes) for s in steps)
    assert len(steps[0].sizes) <= 10  # a failure is told by its sequences


def test_no_mistake_is_told_by_two_names() -> None:
    names = [what for what, _ in MISTAKES]
    assert len(set(names)) == len(names)
    # The narrower mistake is told first where both explain an output.
    narrow = {what for what, _ in CUTS}
    wide = {"the window is ignored", "nothing is masked"}
    order = [what for what in names if what in narrow | wide]
    assert list(itertools.takewhile(lambda what: what in narrow, order)) == order[: len(narrow)]
