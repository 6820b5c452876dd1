"""The ends of what numbers can be: whole ones beyond 2^53, exponentials that nearly vanish."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from native_calls import FLOATS, run, same

from jackfield_plugins.compiler.native.entering import operator
from jackfield_plugins.compiler.native.operators import native_calls

LARGE = [0, 1, -1, 7, 2**24 + 1, 2**31 - 1, -(2**31), 2**53 + 1, -(2**53) - 3, 2**62 + 5, 2**63 - 1,
         -(2**63)]  # fmt: skip
WHOLE = (torch.int64, torch.int32)


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Each beside each."""
    ends = torch.iinfo(dtype)
    pairs = [p for p in itertools.product(LARGE, LARGE) if ends.min <= min(p) <= max(p) <= ends.max]
    x, y = zip(*pairs, strict=True)
    return torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_are_exact_to_their_ends(dtype: torch.dtype) -> None:
    x, y = numbers(dtype)
    for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge"):
        same(f"aten.{name}.Tensor", x, y)
        for number in (3, -1, torch.iinfo(dtype).max, torch.iinfo(dtype).min):
            same(f"aten.{name}.Scalar", x, number)
    for alpha in (3, -1, 2**31 - 1):
        same("aten.add.Tensor", x, y, alpha=alpha)
        same("aten.sub.Tensor", x, y, alpha=alpha)
    for name in ("neg", "abs", "logical_not"):
        same(f"aten.{name}.default", x)
    for name in ("maximum", "minimum", "logical_and", "logical_or"):
        same(f"aten.{name}.default", x, y)
    same("aten.pow.Tensor_Scalar", x, 2)
    same("aten.where.self", x > y, x, y)
    same("aten.masked_fill.Scalar", x, x > y, torch.iinfo(dtype).max)
    same("aten.clamp.default", x, -7)
    same("aten.clamp.default", x, torch.iinfo(dtype).min + 1, torch.iinfo(dtype).max - 1)
    same("aten.clamp_max.default", x, torch.iinfo(dtype).max - 2)
    same("aten.rsub.Scalar", x, torch.iinfo(dtype).max)


def test_whole_numbers_of_two_sizes() -> None:
    x, y = numbers(torch.int32)
    for name in ("add", "mul", "eq", "lt"):
        same(f"aten.{name}.Tensor", x, y.long() + 2**40)


@pytest.mark.parametrize("source", WHOLE, ids=str)
@pytest.mark.parametrize("into", [*FLOATS, torch.int32, torch.bool], ids=str)
def test_whole_numbers_are_rounded_once(source: torch.dtype, into: torch.dtype) -> None:
    x, _ = numbers(source)
    near = torch.tensor([2**54 + 2**30 + 1, 2**60 + 2**36 + 1, 2**25 + 3]).to(source)
    found, due = run("aten._to_copy.default", torch.cat([x, near]), dtype=into)
    assert torch.equal(found, due)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_whole_numbers_beside_real_ones(dtype: torch.dtype) -> None:
    """They are rounded to what both become, or left to torch."""
    x, _ = numbers(torch.int64)
    y = x.to(dtype)
    exact = 0
    for name in ("eq", "lt", "ge", "mul", "add"):
        for target, args in (
            (f"aten.{name}.Tensor", (x, y)),
            (f"aten.{name}.Tensor", (y, x)),
            (f"aten.{name}.Scalar", (x, 0.5)),
            (f"aten.{name}.Scalar", (x, 2.0**24)),
        ):
            due = operator(target)(*args)
            out = torch.empty_like(due)
            if native_calls(target, args, {}, out) is not None:
                found, due = run(target, *args)
                assert torch.equal(found, due), (target, found, due)
                exact += 1
    assert exact >= 10


def test_exponentials_to_the_ends_of_float32() -> None:
    """Numbers that are less than the least normal one, and the last before infinity."""
    x = torch.cat([torch.linspace(-105, -85, 4001), torch.linspace(87, 89, 2001)])
    for name in ("exp", "sigmoid"):  # torch's own sigmoid ends where its exponential is infinite
        found, _ = run(f"aten.{name}.default", x)
        due = operator(f"aten.{name}.default")(x.double()).float()
        steps = (found.view(torch.int32) - due.view(torch.int32)).abs()
        assert steps.max() <= 4, (name, x[steps.argmax()], found[steps.argmax()])
    found, _ = run("aten.exp.default", torch.tensor([-104.0, -1e30, 88.73, -math.inf, math.inf]))
    assert found.tolist() == [0.0, 0.0, math.inf, 0.0, math.inf]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["expm1", "log1p"])
def test_what_is_nearly_nothing_keeps_its_digits(name: str, dtype: torch.dtype) -> None:
    x = torch.logspace(-12, 1, 300, dtype=torch.float64).to(dtype)
    for signed in (x, -x / 20):
        found, due = run(f"aten.{name}.default", signed)
        assert ((found - due).abs() <= 2 * torch.finfo(dtype).eps * due.abs()).all()
