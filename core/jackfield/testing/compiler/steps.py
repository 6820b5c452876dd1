"""Checks of a compiled step by itself: a small model without attention, called by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from jackfield.contracts import BindContext
from jackfield.contracts.requirements import DTYPES
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.subject import Subject

VOCAB, WIDTH = 31, 24

#: (rows, tokens a row, columns that are wanted; None: all)
SHAPES = (
    (1, 1, None),
    (1, 5, (4,)),
    (3, 1, None),
    (2, 7, (0, 3, 6)),
    (5, 3, None),
    (1, 33, (2, 1)),
)
LIMIT = 240.0


class Tiny(nn.Module):
    """What a step does beside attention: embeddings of ids and positions, a layer, a head."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.ids, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.to(dtype).eval()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits `[rows, columns, vocab]`."""
        states = self.ids(input_ids) + self.places(position_ids)
        states = states + nn.functional.silu(self.layer(states))
        logits: torch.Tensor = self.head(states if keep is None else states[:, keep])
        return logits


class Compiled:
    """A step of `Tiny` that the compiler under test compiled."""

    def __init__(self, subject: Subject, dtype: str, seed: int = 0) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.model = model = Tiny(self.dtype, seed).to(subject.device)
        context: Any = BindContext(
            model=model,  # type: ignore[arg-type]
            config=None,  # type: ignore[arg-type]
            requirements=None,  # type: ignore[arg-type]
            options=subject.options,
        )
        self.compilation = subject.registered.bind(context)

        def step(
            input_ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor | None
        ) -> torch.Tensor:
            return model(input_ids, position_ids, keep)  # type: ignore[no-any-return]

        self.run = self.compilation.compile(step)
        if self.run is step:
            raise WrongError("compile returns the very step, which is not compiled")

    def __call__(self, *given: torch.Tensor | None) -> torch.Tensor:
        with torch.inference_mode():
            return self.run(*given)  # type: ignore[no-any-return]

    def check(self, given: tuple[Any, ...], what: str) -> None:
        """Compare what it says with the model itself, in float64."""
        right = _exact(self.model, given)
        kept = [None if t is None else t.clone() for t in given]
        found: Any = self(*given)
        for one, other, name in zip(given, kept, ("ids", "positions", "columns"), strict=True):
            if one is not None and other is not None and not torch.equal(one, other):
                raise WrongError(f"{what}: changes the {name} that it was lent")
        if not isinstance(found, torch.Tensor) or found.shape != right.shape:
            got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise WrongError(f"{what}: returns {got}, where logits {list(right.shape)} are right")
        bound = 16 * torch.finfo(self.dtype).eps * max(1.0, float(right.abs().max()))
        off = float((found.double() - right).abs().max())
        if not off <= bound:
            raise WrongError(
                f"{what}: logits are off by {off:.3g}, where {bound:.3g} is rounding"
                f"{_usual(self.model, given, found, bound)}"
            )


def _exact(model: Tiny, given: tuple[Any, ...]) -> torch.Tensor:
    import copy

    with torch.inference_mode():
        return copy.deepcopy(model).double()(*given)  # type: ignore[no-any-return]


def _usual(model: Tiny, given: tuple[Any, ...], found: torch.Tensor, bound: float) -> str:
    """What else the logits are those of."""
    ids, places, keep = given
    others = {
        "positions are taken for zeros": (ids, torch.zeros_like(places), keep),
        "positions are one further": (ids, places + 1, keep),
        "rows are in reverse order": (ids.flip(0), places.flip(0), keep),
    }
    if keep is not None:
        others["the columns are one earlier"] = (ids, places, keep - 1)
        others["the columns are taken for the first ones"] = (
            ids,
            places,
            torch.arange(len(keep), device=ids.device),
        )
    for words, other in others.items():
        if float((found.double() - _exact(model, other)).abs().max()) <= 4 * bound:
            return f": {words}"
    return ""


def inputs(
    shape: tuple[int, int, Any], seed: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Ids and positions `[rows, tokens]`, and the columns, int64."""
    rows, width, columns = shape
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, width), generator=drawn)
    places = torch.randint(0, 60, (rows, width), generator=drawn)
    keep = None if columns is None else torch.tensor(columns, device=device)
    return ids.to(device), places.to(device), keep


def checks(subject: Subject) -> Iterator[Check]:
    """All of them."""

    def of(check: Callable[[Subject, Any], str | None]) -> Callable[[Any], str | None]:
        def run(case: Any) -> str | None:
            if reasons := subject.backend.available():
                raise NotTriedError("; ".join(map(str, reasons)))
            if subject.device not in subject.backend.capabilities.devices:
                raise NotTriedError(f"it does not run on {subject.device}")
            return check(subject, case)

        return run

    dtypes = tuple(d for d in DTYPES if d in subject.backend.capabilities.dtypes)
    yield Check("step.fill", "contract", of(_fill))
    yield Check("step.other_numbers", "contract", of(_numbers), limit=LIMIT)
    yield Check("step.weights", "contract", of(_weights), limit=LIMIT)
    yield Check("step.two_models", "contract", of(_two), limit=LIMIT)
    yield Check("step.shapes", "dtypes", of(_shapes), cases=dtypes, limit=LIMIT)
    yield Check("step.close", "contract", of(_close), limit=LIMIT)


def _first(subject: Subject) -> str:
    known = subject.backend.capabilities.dtypes
    return "float32" if "float32" in known else min(known)


def _fill(subject: Subject, _: object) -> str:
    compiled = Compiled(subject, _first(subject))
    for count in (1, 2, 3, 5, 8, 17, 64, 65, 1000):
        found = compiled.compilation.fill(count)
        if type(found) is not int or found < count:
            raise WrongError(f"fill({count}) is {found!r}, where a number from {count} on is right")
        if found > 4 * count + 64:
            raise WrongError(f"fill({count}) is {found}: most of such a step computes nothing")
        if compiled.compilation.fill(found) != found:
            raise WrongError(f"fill({found}) is not {found}, to which fill({count}) fills up")
    return "up to 1,000"


def _shapes(subject: Subject, dtype: str) -> str:
    """Each shape twice: the second time nothing is compiled any more."""
    compiled = Compiled(subject, dtype)
    for again in (False, True):
        before = compiled.compilation.graphs
        for number, shape in enumerate(SHAPES):
            given = inputs(shape, number, subject.device)
            rows, width, columns = shape
            where = f"{rows} rows of {width}, {'all' if columns is None else len(columns)} columns"
            compiled.check(given, f"{dtype}, {where}")
        graphs = compiled.compilation.graphs
        if graphs < 1:
            raise WrongError("ran compiled steps, and `graphs` counts none")
        if graphs > 2 * len(SHAPES):
            raise WrongError(f"compiled {graphs} graphs for {len(SHAPES)} shapes")
        if again and graphs != before:
            raise WrongError(
                f"compiled {graphs - before} more graphs for shapes that it had before"
            )
    seconds = compiled.compilation.seconds
    if not seconds >= 0:
        raise WrongError(f"`seconds` is {seconds}")
    compiled.compilation.close()
    return f"{graphs} graphs for {len(SHAPES)} shapes, {seconds:.1f} s"


def _numbers(subject: Subject, _: object) -> None:
    """The same buffers with other numbers, and other buffers with the same."""
    compiled = Compiled(subject, _first(subject))
    given = inputs((2, 1, None), 1, subject.device)
    compiled.check(given, "a first step")
    for seed in range(2, 7):
        for own, other in zip(
            given[:2], inputs((2, 1, None), seed, subject.device)[:2], strict=True
        ):
            own.copy_(other)
        compiled.check(given, f"step {seed}, with other numbers in the same tensors")
        compiled.check(
            inputs((2, 1, None), seed, subject.device), f"step {seed}, with other tensors"
        )
    ids, places, _none = given
    compiled.check((ids.flip(0).flip(0), places.T.contiguous().T, None), "strided inputs")


def _weights(subject: Subject, _: object) -> None:
    """Weights that are changed in place, or are others, count from the next step on."""
    compiled = Compiled(subject, _first(subject))
    given = inputs((2, 3, None), 1, subject.device)
    compiled.check(given, "a first step")
    with torch.no_grad():
        compiled.model.layer.weight.mul_(-2)
        compiled.model.head.bias.add_(1)
    compiled.check(given, "after weights were changed in place")
    with torch.no_grad():
        compiled.model.layer.weight.data = compiled.model.layer.weight.data.flip(0).clone()
    compiled.compilation.anew = True  # as the engine says when the next request comes
    compiled.check(given, "after a weight was moved to other memory")


def _two(subject: Subject, _: object) -> None:
    dtype = _first(subject)
    both = [Compiled(subject, dtype, seed) for seed in (1, 2)]
    for number in range(3):
        for which, compiled in enumerate(both):
            given = inputs((2, 1, None), number, subject.device)
            compiled.check(given, f"two models in turns, step {number} of model {which + 1}")
    both[0].compilation.close()
    both[1].check(inputs((2, 1, None), 9, subject.device), "once another model's steps were closed")


def _close(subject: Subject, _: object) -> None:
    """The model is what it was."""
    compiled = Compiled(subject, _first(subject))
    model, forward = compiled.model, type(compiled.model).forward
    given = inputs((2, 1, None), 1, subject.device)
    compiled(*given)
    compiled.compilation.close()
    compiled.compilation.close()
    if "forward" in vars(model) or type(model).forward is not forward or model.training:
        raise WrongError("leaves the model changed once it is closed")
