"""What is changed of a model while a text is made is seen within a few steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from families import build, config_of
from torch import nn
from transformers import AutoModelForCausalLM

from jackfield_plugins.compiler.holding import _STEPS, Held


def lies_elsewhere(module: nn.Module) -> None:
    module.weight.data = module.weight.data.clone()


def another_weight(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.data)


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def patched(module: nn.Module) -> None:
    module.forward = type(module).forward.__get__(module)  # type: ignore[method-assign]


def retyped(module: nn.Module) -> None:
    module.__class__ = type("Other", (type(module),), {})


def trained(module: nn.Module) -> None:
    module.train(not module.training)


CHANGES = (lies_elsewhere, another_weight, hooked, patched, retyped, trained)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_any_module_is_seen(change: Callable[[nn.Module], None]) -> None:
    config = config_of("llama")
    config.num_hidden_layers = 10  # more modules than steps
    model = AutoModelForCausalLM.from_config(config)
    named = [m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]
    assert len(named) > _STEPS
    for module in named:
        held = Held(model)
        assert all(held.next_is_same() for _ in range(_STEPS))
        change(module)
        assert not all(held.next_is_same() for _ in range(_STEPS))
        assert not (held.is_structure() and held.is_place())
        assert Held(model).is_structure()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.5, 0.7),
        (4, 4.0),
        (True, False),
        ("silu", "gelu"),
        (None, 3),
        (torch.float32, torch.bfloat16),
        ([1, 2], [1, 3]),
        ({"default": 0.5}, {"default": 4.0}),
        (0.5, torch.ones(2)),
        (np.float64(1), np.float64(2)),
        (np.float32(1), np.float32(2)),
        pytest.param(torch.sin, torch.cos, id="functions"),
    ],
    ids=repr,
)
def test_a_setting_that_is_changed_is_seen(before: object, after: object) -> None:
    """A trace holds what an attribute was, e.g. the scale of an adapter."""
    model = build("llama")
    for module in model.modules():
        module.setting = before
        held = Held(model)
        module.setting = copy.copy(before)
        assert held.is_structure()
        if isinstance(before, dict):
            module.setting.update(after)
        else:
            module.setting = after
        assert not held.is_structure()
        assert not all(held.next_is_same() for _ in range(_STEPS))
        del module.setting
        assert not held.is_structure()


class Gain(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.Sequential(nn.Identity())

    def scaled(self, states: torch.Tensor) -> torch.Tensor:
        return states * self.gain

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.several(self.scaled(states))  # type: ignore[no-any-return]


def over_a_class(module: Gain) -> None:
    module.gain = 2.0


def another_method(module: Gain) -> None:
    module.scaled = lambda states: -states  # type: ignore[method-assign]


def one_more_part(module: Gain) -> None:
    module.several.append(nn.Linear(2, 2))


def another_buffer(module: Gain) -> None:
    module.register_buffer("more", torch.ones(1))


@pytest.mark.parametrize("change", [over_a_class, another_method, one_more_part, another_buffer])
def test_what_is_new_in_a_module_is_seen(change: Callable[[Gain], None]) -> None:
    module = Gain()
    model = nn.Sequential(module)
    held = Held(model)
    assert all(held.next_is_same() for _ in range(_STEPS))
    change(module)
    assert not held.is_structure()
    assert not all(held.next_is_same() for _ in range(_STEPS))
