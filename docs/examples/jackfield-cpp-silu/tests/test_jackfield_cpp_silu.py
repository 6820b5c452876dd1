"""What jackfield checks of a kernel, one test each, and what is only known here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from jackfield_cpp_silu import CppSiluBackend


@pytest.mark.parametrize("shape", [(1, 48), (3, 5, 48)])
def test_it_is_the_layer(shape: tuple[int, ...]) -> None:
    config = LlamaConfig(hidden_size=48, intermediate_size=77, num_attention_heads=4)
    layer, rows = LlamaMLP(config), torch.randn(shape)
    fused = CppSiluBackend().bind(None).make(layer)  # this one needs no context
    torch.testing.assert_close(fused(rows), layer(rows))


def test_numbers_at_the_ends() -> None:
    from jackfield_cpp_silu.operator import silu_mul

    inf = float("inf")
    ends = [-inf, -3e38, -1e30, -100.0, -88.0, -1e-38, -0.0, 0.0, 1e-38, 88.0, 100.0, 3e38, inf]
    gate = torch.tensor(ends).repeat_interleave(9)  # in a vector, and in the rest of one
    found, right = silu_mul(gate, torch.ones_like(gate)), torch.nn.functional.silu(gate)
    torch.testing.assert_close(found, right, equal_nan=True)


def test_not_a_number_stays_one() -> None:
    from jackfield_cpp_silu.operator import silu_mul

    one, nan = torch.ones(33), torch.full((33,), float("nan"))
    assert silu_mul(nan, one).isnan().all()
    assert silu_mul(one, nan).isnan().all()


def test_a_compiler_can_put_it_into_a_graph() -> None:
    from jackfield_cpp_silu.operator import silu_mul

    torch.library.opcheck(silu_mul, (torch.randn(3, 7), torch.randn(3, 7)))


@pytest.mark.jackfield_backend("plugin:cpp-silu", kind="kernel")
def test_declared(jackfield_check: Callable[[], None]) -> None:
    jackfield_check()
