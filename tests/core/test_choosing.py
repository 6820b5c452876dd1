"""The best token of a row: what torch's `max` says, by a faster way on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jackfield.sampling.choosing import best_of

ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0, -2.5, float(torch.finfo(torch.float32).max))


def same(found: tuple[torch.Tensor, torch.Tensor], scores: torch.Tensor) -> bool:
    tokens, best = found
    due = scores.max(-1)
    equal = torch.equal(tokens, due.indices) and tokens.dtype == torch.long
    return equal and torch.equal(best.nan_to_num(7e5), due.values.nan_to_num(7e5))


@given(
    seed=st.integers(0, 1 << 20),
    rows=st.integers(1, 5),
    width=st.integers(1, 400),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    odd=st.integers(0, 60),
    values=st.integers(1, 6),
)
def test_it_is_the_first_of_the_best_ones_also_beside_nan(
    seed: int, rows: int, width: int, dtype: torch.dtype, odd: int, values: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, values, (rows, width), generator=chance).to(dtype)
    places = torch.randint(0, rows * width, (odd,), generator=chance)
    which = torch.randint(0, len(ODD), (odd,), generator=chance)
    scores.view(-1)[places] = torch.tensor(ODD, dtype=dtype)[which]
    assert same(best_of(scores), scores)


@pytest.mark.parametrize("width", [151_936, 32_003])
def test_it_reads_rows_that_do_not_lie_together(width: int) -> None:
    wide = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(0))
    assert same(best_of(wide[:, -1]), wide[:, -1])
    wide.requires_grad_()
    assert same(best_of(wide[:, 0]), wide[:, 0].detach())
