"""What jackfield checks of a quantizer, one test each, and what is only known here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jackfield_int8_rows.layers import quantize


def test_no_weight_is_off_by_more_than_half_a_scale() -> None:
    weight = torch.cat([torch.randn(8, 48), torch.zeros(1, 48)])
    integers, scale = quantize(weight)
    assert integers.dtype is torch.int8
    assert ((integers * scale - weight).abs() <= scale / 2 * 1.0001).all()


@pytest.mark.jackfield_backend("plugin:int8-rows", kind="quantizer")
def test_declared(jackfield_check: Callable[[], None]) -> None:
    jackfield_check()
