"""What jackfield checks of a quantizer, one test each, and what is only known here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jackfield_native_rows.layers import quantize
from jackfield_native_rows.operator import linear


def test_no_weight_is_off_by_more_than_half_a_scale() -> None:
    weight = torch.cat([torch.randn(8, 48), torch.zeros(1, 48)])
    integers, scale = quantize(weight)
    assert integers.dtype is torch.int8
    assert ((integers * scale - weight).abs() <= scale / 2 * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 70), (2, 3, 70), (33, 70), (0, 70)])
def test_the_product_is_that_of_the_integers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    integers, scale = quantize(torch.randn(9, 70))
    x, bias = torch.randn(shape).to(dtype), torch.randn(9).to(dtype)
    due = x.double() @ (integers * scale).double().T + bias.double()
    found = linear(x, integers, scale, bias)
    torch.testing.assert_close(found.double(), due, rtol=1e-2, atol=1e-2)


@pytest.mark.jackfield_backend("plugin:native-rows", kind="quantizer")
def test_declared(jackfield_check: Callable[[], None]) -> None:
    jackfield_check()
