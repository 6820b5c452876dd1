"""What a kernel keeps between calls, and what a row's bits depend on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch

from jackfield.testing.checks import WrongError
from jackfield.testing.kernel.layers import Layer
from jackfield.testing.kernel.numbers import Rows, held
from jackfield.testing.threads import are_alone


def repeated(layers: Seq[Layer], seed: int) -> None:
    """Layers in turn, inputs of several sizes; outputs stay as they were."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(3):
        for number, shape in enumerate(((2,), (2,), (65,), (1,), (2, 3), (1,))):
            which = (turn + number) % len(layers)
            layer = layers[which]
            given = Rows(shape).made(layer, seed + 6 * turn + number)
            try:
                held(layer, given)
                with torch.inference_mode():
                    found = layer.fused(given)
            except WrongError as error:
                other = _whose(layers, which, given)
                raise WrongError(f"in call {len(kept)}, of layer {which}: {error}{other}") from None
            kept.append((found, found.clone()))
    if not all(torch.equal(found, before) for found, before in kept):
        raise WrongError(
            "the output of a call changes in a later call: it is memory that is used again, and "
            "an output belongs to the model"
        )
    many = [Rows((4097,)).made(layers[0], seed + turn) for turn in range(2)]
    if not are_alone([partial(layers[0].fused, one) for one in many]):
        raise WrongError(
            "a call returns other numbers while another thread makes one: calls share memory that "
            "each of them needs for itself"
        )


def _whose(layers: Seq[Layer], which: int, given: torch.Tensor) -> str:
    """Whether it computed another layer than its own."""
    with torch.inference_mode():
        found = layers[which].fused(given)
        for number, layer in enumerate(layers):
            if number != which and layer.size == given.shape[-1]:
                own = layer.module(given)
                if own.shape == found.shape and torch.allclose(own, found, rtol=0.02, atol=0.02):
                    return f"; it computes layer {number}, whose function it is not"
    return ""


def inplace(layers: Seq[Layer], seed: int) -> None:
    """Parameters that are given other numbers, as a fine-tuned model's are."""
    layer = layers[0]
    given = Rows((3,)).made(layer, seed)
    held(layer, given)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "": lambda own: own.mul_(-1.5),
        " by way of `data`, which counts as no change of theirs": lambda own: own.data.mul_(0.4),
    }
    for way, change in ways.items():
        with torch.no_grad():
            for own, exact in zip(layer.module.parameters(), layer.exact.parameters(), strict=True):
                change(own)
                exact.copy_(own)
        try:
            held(layer, given)
        except WrongError as error:
            raise WrongError(
                f"once the layer's parameters have other numbers{way}: {error}; it keeps a copy of "
                "the old ones"
            ) from None


def together(layers: Seq[Layer], seed: int) -> None:
    """Rows by themselves have the bits that they have among others."""
    layer = layers[0]
    whole = Rows((80,)).made(layer, seed)
    with torch.inference_mode():
        due = layer.fused(whole)
        for count in (1, 2, 17, 65):
            for begin in (0, 5, 80 - count):
                found = layer.fused(whole[begin : begin + count])
                if not torch.equal(found, due[begin : begin + count]):
                    raise WrongError(
                        f"{count} rows by themselves have other bits than among 80, and "
                        "batch_invariant is declared"
                    )
        if not torch.equal(layer.fused(whole.view(4, 20, -1)).view_as(due), due):
            raise WrongError("rows of a batch have other bits, and batch_invariant is declared")
