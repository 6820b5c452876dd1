"""What the proof of a kernel finds at load: what honest authors get wrong in a layer's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from jackfield.bridge.layer_proof import prove
from jackfield.errors import ExecutionError, PluginError

Function = Callable[[torch.Tensor], Any]
Make = Callable[[nn.Linear, dict[Any, Any]], Function]


def plain(module: nn.Linear, _: dict[Any, Any]) -> Function:
    return lambda x: linear(x, module.weight, module.bias)


def bias_by_shape(module: nn.Linear, known: dict[Any, Any]) -> Function:
    bias = known.setdefault(module.weight.shape, module.bias)
    return lambda x: linear(x, module.weight, bias)


def weight_by_shape(module: nn.Linear, known: dict[Any, Any]) -> Function:
    weight = known.setdefault(module.weight.shape, module.weight)
    return lambda x: linear(x, weight, module.bias)


def last_module(module: nn.Linear, known: dict[Any, Any]) -> Function:
    known["module"] = module
    return lambda x: linear(x, known["module"].weight, known["module"].bias)


def one_output(module: nn.Linear, known: dict[Any, Any]) -> Function:
    def forward(x: torch.Tensor) -> torch.Tensor:
        found = linear(x, module.weight, module.bias)
        return known.setdefault(found.shape, found).copy_(found)  # type: ignore[no-any-return]

    return forward


def answers_again(module: nn.Linear, known: dict[Any, Any]) -> Function:
    return lambda x: known.setdefault(x.shape, linear(x, module.weight, module.bias))


def writes(module: nn.Linear, _: dict[Any, Any]) -> Function:
    return lambda x: linear(x, module.weight, module.bias) + 0 * x.mul_(2).sum()


def wide(module: nn.Linear, _: dict[Any, Any]) -> Function:
    return lambda x: linear(x, module.weight, module.bias).double()


def flat(module: nn.Linear, _: dict[Any, Any]) -> Function:
    return lambda x: linear(x.flatten(0, -2), module.weight, module.bias)


def first_of_batch(module: nn.Linear, _: dict[Any, Any]) -> Function:
    def forward(x: torch.Tensor) -> torch.Tensor:
        found = linear(x, module.weight, module.bias)
        return found if x.dim() == 2 else found[:1].expand_as(found)

    return forward


def no_bias(module: nn.Linear, _: dict[Any, Any]) -> Function:
    return lambda x: linear(x, module.weight)


def eight_rows(module: nn.Linear, _: dict[Any, Any]) -> Function:
    def forward(x: torch.Tensor) -> torch.Tensor:
        found = linear(x, module.weight, module.bias)
        return found if x.dim() > 2 else torch.cat([found[:8], 0 * found[8:]])

    return forward


def nothing(module: nn.Linear, _: dict[Any, Any]) -> Function:
    return lambda x: None


def pairs(make: Make) -> list[tuple[nn.Module, Function]]:
    """Of one shape, with a bias and without, and of another shape."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 8)]
    known: dict[Any, Any] = {}
    return [(layer, make(layer, known)) for layer in layers]


def test_what_a_layer_computes_is_proven() -> None:
    prove("it", pairs(plain))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (bias_by_shape, "does not compute what Linear does"),
        (weight_by_shape, "does not compute what Linear does"),
        (last_module, r"gives \[1, 8\], and \[1, 16\] is due"),
        (one_output, "does not compute what Linear does"),
        (answers_again, "does not compute what Linear does"),
        (no_bias, "does not compute what Linear does"),
        (eight_rows, "does not compute what Linear does"),
        (first_of_batch, "does not compute what Linear does"),
        (writes, "writes into what Linear is given"),
        (wide, r"gives torch.float64 for Linear, and torch.float32 is due"),
        (flat, r"gives \[6, 16\], and \[2, 3, 16\] is due"),
    ],
)
def test_what_it_does_not_is_refused(make: Make, words: str) -> None:
    with pytest.raises(ExecutionError, match=words):
        prove("it", pairs(make))  # type: ignore[arg-type]


def test_a_function_returns_a_tensor() -> None:
    with pytest.raises(PluginError, match="its function must return a tensor, got None"):
        prove("it", pairs(nothing))  # type: ignore[arg-type]
