"""What is changed of a model while a text is made is seen within a few steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from families import build
from torch import nn

from jackfield_plugins.compiler.native.holding import _STEPS, Held


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


CHANGES = (lies_elsewhere, another_weight, hooked, patched, retyped)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_any_module_is_seen(change: Callable[[nn.Module], None]) -> None:
    model = build("llama")
    named = [m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]
    assert len(named) > _STEPS
    for module in named:
        held = Held(model)
        assert all(held.next_is_same() for _ in range(_STEPS))
        change(module)
        assert not all(held.next_is_same() for _ in range(_STEPS))
        assert not (held.is_structure() and held.is_place())
        assert Held(model).is_structure()
