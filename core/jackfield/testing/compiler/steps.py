"""Checks of a compiled step by itself: a small model without attention, called by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from jackfield.contracts import BindContext
from jackfield.contracts.requirements import DTYPES
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.subject import Subject

VOCAB, WIDTH = 31, 24
#: Positions of `Tiny`: more than two bytes can count.
PLACES = 70_000

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
NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


class Tiny(nn.Module):
    """What a step does beside attention: embeddings of ids and positions, a layer, a head."""

    def __init__(self, dtype: torch.dtype, seed: int, vocab: int = VOCAB) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.ids, self.places = nn.Embedding(vocab, WIDTH), nn.Embedding(PLACES, WIDTH)
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, vocab)
        self.to(dtype).eval()

    @property
    def device(self) -> torch.device:
        """As models of transformers have it."""
        return self.ids.weight.device

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

    def __init__(self, subject: Subject, dtype: str, seed: int = 0, vocab: int = VOCAB) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.model = model = Tiny(self.dtype, seed, vocab).to(subject.device)
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

    def check(
        self, given: tuple[Any, ...], what: str, others: Mapping[str, torch.Tensor] = NOTHING
    ) -> None:
        """Compare what it says with the model itself, in float64.

        `others` are logits that it may say by mistake, after the words for that. Raises WrongError,
        which begins with `what`.
        """
        kept = [None if t is None else t.clone() for t in given]
        right = exact(self.model, given)
        found: Any = self(*given)
        for one, other, name in zip(given, kept, ("ids", "positions", "columns"), strict=True):
            if one is not None and other is not None and not torch.equal(one, other):
                raise WrongError(f"{what}: changes the {name} that it was lent")
        self.hold(found, right, what, lambda off: _usual(self.model, given, found, off, others))

    def hold(
        self, found: Any, right: torch.Tensor, what: str, usual: Callable[[float], str]
    ) -> None:
        """Compare logits with those that are `right`. Raises WrongError, which ends with `usual`
        of what may be rounding."""
        if not isinstance(found, torch.Tensor) or found.shape != right.shape:
            got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise WrongError(f"{what}: returns {got}, where logits {list(right.shape)} are right")
        if found.dtype != self.dtype:
            raise WrongError(f"{what}: returns logits in {found.dtype}, where {self.dtype} is due")
        bound = 16 * torch.finfo(self.dtype).eps * max(1.0, float(right.abs().max()))
        away = (found.double() - right).abs()
        off = float(away.max())
        if not off <= bound:
            raise WrongError(
                f"{what}: logits are off by {off:.3g}{_where(~(away <= bound))}, where {bound:.3g} "
                f"is rounding{usual(bound)}"
            )


def _where(bad: torch.Tensor) -> str:
    """In which rows, columns and tokens of `[rows, columns, vocab]`, where not in all."""
    told = []
    for dim, name in enumerate(("row", "column", "token")):
        off = bad.transpose(0, dim).flatten(1).any(1).nonzero().flatten().tolist()
        if len(off) < bad.shape[dim]:
            numbers = f" {off[0]}" if len(off) == 1 else f"s {off[0]} to {off[-1]}"
            told.append(f"{name}{numbers} of {bad.shape[dim]}")
    return f" in {', '.join(told)}" if told else ""


def exact(model: Tiny, given: tuple[Any, ...]) -> torch.Tensor:
    """Logits in float64."""
    with torch.inference_mode():
        return copy.deepcopy(model).double()(*given)  # type: ignore[no-any-return]


def _usual(
    model: Tiny,
    given: tuple[Any, ...],
    found: torch.Tensor,
    bound: float,
    known: Mapping[str, torch.Tensor],
) -> str:
    """What else the logits are those of."""
    for words, logits in known.items():
        if nearly(found, logits, bound):
            return f": {words}"
    ids, places, keep = given
    others = {
        "positions are taken for zeros": (ids, torch.zeros_like(places), keep),
        "positions are one further": (ids, (places + 1).clamp(max=PLACES - 1), keep),
        "positions are cut to 15 bits": (ids, places % (1 << 15), keep),
        "positions are cut to 16 bits": (ids, places % (1 << 16), keep),
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
        if nearly(found, exact(model, other), bound):
            return f": {words}"
    return ""


def nearly(found: torch.Tensor, logits: torch.Tensor, bound: float) -> bool:
    """Whether these are the same logits, but for rounding."""
    return found.shape == logits.shape and bool((found.double() - logits).abs().max() <= 4 * bound)


def inputs(
    shape: tuple[int, int, Any], seed: int, device: str, vocab: int = VOCAB
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Ids and positions `[rows, tokens]`, and the columns, int64.

    Positions are small ones and large ones: as many have few digits as have many.
    """
    rows, width, columns = shape
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, width), generator=drawn)
    digits = torch.rand((rows, width), generator=drawn, dtype=torch.float64)
    places = (PLACES**digits).long() - 1
    keep = None if columns is None else torch.tensor(columns, device=device)
    return ids.to(device), places.to(device), keep


def tried(
    subject: Subject, check: Callable[[Subject, Any], str | None]
) -> Callable[[Any], str | None]:
    """`check`, where the compiler runs on this machine and on the device."""

    def run(case: Any) -> str | None:
        if reasons := subject.backend.available():
            raise NotTriedError("; ".join(map(str, reasons)))
        if subject.device not in subject.backend.capabilities.devices:
            raise NotTriedError(f"it does not run on {subject.device}")
        return check(subject, case)

    return run


def checks(subject: Subject) -> Iterator[Check]:
    """All of them."""
    of = partial(tried, subject)
    dtypes = tuple(d for d in DTYPES if d in subject.backend.capabilities.dtypes)
    yield Check("step.fill", "contract", of(_fill))
    yield Check("step.other_numbers", "contract", of(_numbers), limit=LIMIT)
    yield Check("step.weights", "contract", of(_weights), limit=LIMIT)
    yield Check("step.two_models", "contract", of(_two), limit=LIMIT)
    yield Check("step.shapes", "dtypes", of(_shapes), cases=dtypes, limit=LIMIT)
    yield Check("step.close", "contract", of(_close), limit=LIMIT)


def main_dtype(subject: Subject) -> str:
    """The dtype of what is not about dtypes."""
    known = subject.backend.capabilities.dtypes
    return "float32" if "float32" in known else min(known)


def _fill(subject: Subject, _: object) -> str:
    compiled = Compiled(subject, main_dtype(subject))
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
    compiled = Compiled(subject, main_dtype(subject))
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
    compiled = Compiled(subject, main_dtype(subject))
    given = inputs((2, 3, None), 1, subject.device)
    compiled.check(given, "a first step")
    for name, weight in compiled.model.named_parameters():
        with torch.no_grad():
            before = {"the weights are those of before, and the change is not noticed":
                      exact(compiled.model, given)}  # fmt: skip
            weight.mul_(-1.5)
        compiled.check(given, f"after weights were changed in place ({name})", before)
    for name, weight in compiled.model.named_parameters():
        with torch.no_grad():
            before = {"the weights are those at the old place": exact(compiled.model, given)}
            weight.data = weight.data.flip(0).clone()
        compiled.compilation.anew = True  # as the engine says when the next request comes
        compiled.check(given, f"after a weight was moved to other memory ({name})", before)


def _unread(both: list[Compiled], subject: Subject) -> None:
    """Logits are read before the same function is called again, and maybe behind another's."""
    given = [inputs((2, 1, None), seed, subject.device) for seed in (3, 4)]
    right = [exact(compiled.model, one) for compiled, one in zip(both, given, strict=True)]
    found: list[Any] = [compiled(*one) for compiled, one in zip(both, given, strict=True)]

    def usual(bound: float) -> str:
        return ": they are the other's" if nearly(found[0], right[1], bound) else ""

    what = "logits that are read when a step of another engine has run"
    both[0].hold(found[0], right[0], what, usual)


def _two(subject: Subject, _: object) -> None:
    dtype = main_dtype(subject)
    both = [Compiled(subject, dtype, seed) for seed in (1, 2)]
    for number in range(3):
        for which, compiled in enumerate(both):
            given = inputs((2, 1, None), number, subject.device)
            compiled.check(given, f"two models in turns, step {number} of model {which + 1}")
    _unread(both, subject)
    both[0].compilation.close()
    both[1].check(inputs((2, 1, None), 9, subject.device), "once another model's steps were closed")


def _close(subject: Subject, _: object) -> None:
    """The model is what it was."""
    compiled = Compiled(subject, main_dtype(subject))
    model, forward = compiled.model, type(compiled.model).forward
    given = inputs((2, 1, None), 1, subject.device)
    compiled(*given)
    compiled.compilation.close()
    compiled.compilation.close()
    if "forward" in vars(model) or type(model).forward is not forward or model.training:
        raise WrongError("leaves the model changed once it is closed")
