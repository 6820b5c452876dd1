"""Direct calls of what a kernel puts in a layer's place, held to the layer itself in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from jackfield.bridge.layer_proof import NOT_OF_ONE_TENSOR, of_a_sum, own_rows
from jackfield.testing import threads
from jackfield.testing.checks import WrongError
from jackfield.testing.kernel.layers import Layer
from jackfield.testing.watching import Snapshot

#: How an input lies in memory, of the same numbers.
LYING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda rows: rows,
    "every second row": lambda rows: rows.repeat_interleave(2, -2)[..., ::2, :],
    "cut out of wider rows": lambda rows: torch.cat([rows, rows], -1)[..., : rows.shape[-1]],
    "columns first": lambda rows: rows.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second column": lambda rows: rows.repeat_interleave(2, -1)[..., ::2],
}


@dataclass(frozen=True)
class Rows:
    """An input: `[*shape, size]`. `wide` is what its numbers are multiplied with.

    Where the layer itself has no finite number for it, as with float16, it is made smaller.
    """

    shape: tuple[int, ...]
    lying: str = "dense"
    wide: float = 1.0
    special: str = ""

    def __str__(self) -> str:
        parts = [f"an input of {' x '.join(map(str, (*self.shape, 'size')))}"]
        parts += [self.lying] if self.lying != "dense" else []
        parts += [f"numbers of about {self.wide:g}"] if self.wide != 1 else []
        return ", ".join([*parts, self.special] if self.special else parts)

    def made(self, layer: Layer, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn((*self.shape, layer.size), generator=generator) * self.wide
        if self.special:
            SPECIAL[self.special](rows.view(-1, layer.size))
        parameter = next(layer.module.parameters())
        for _ in range(20):
            given = LYING[self.lying](rows.to(parameter.device, parameter.dtype))
            with torch.inference_mode():
                if bool(_own(layer, given).isfinite().all()):
                    break
            rows /= 8
        return given


def _own(layer: Layer, given: torch.Tensor) -> torch.Tensor:
    """What the layer itself returns. Raises WrongError where it takes or gives something else."""
    found = own_rows(layer.module, given)
    if found is None:
        raise WrongError(f"it fits {type(layer.module).__name__}, {NOT_OF_ONE_TENSOR}")
    return found


def _zeros(rows: torch.Tensor) -> None:
    rows[::2] = 0


def _uneven(rows: torch.Tensor) -> None:
    rows *= 4.0 ** torch.arange(-5, 3).repeat(len(rows))[: len(rows), None]


def _outlier(rows: torch.Tensor) -> None:
    rows[:, 0] *= 200


def _constant(rows: torch.Tensor) -> None:
    rows += 50


#: Rows that are hard to get right.
SPECIAL: Mapping[str, Callable[[torch.Tensor], None]] = {
    "every second row is 0": _zeros,
    "rows of very different size": _uneven,
    "one large number in each row": _outlier,
    "a large mean": _constant,
}

FLAT = ((1,), (2,), (65,), (1000,), (1025,), (4097,))
DEEP = ((1, 1), (2, 3), (3, 65), (1, 1000), (3, 1025))
ROWS = tuple(Rows(shape) for shape in FLAT), tuple(Rows(shape) for shape in DEEP)
#: Of short rows: powers of two that blocks and grids may have, and one more.
MANY = tuple(Rows((count,)) for count in (257, 513, 2049, 8193, 16385, 65537))


def strided() -> Iterator[Rows]:
    for lying in LYING:
        if lying != "dense":
            yield Rows((5,), lying)
            yield Rows((2, 65), lying)


def extreme(dtype: torch.dtype) -> Iterator[Rows]:
    """Numbers as large and as small as `dtype` has them, without overflow of their squares."""
    largest = 1e4 if dtype == torch.float16 else 1e15
    for wide in (1e-3, 1e-5, 100.0, largest):
        yield Rows((3,), wide=wide)
    for special in SPECIAL:
        yield Rows((7,), special=special)


def held(layer: Layer, given: torch.Tensor) -> float:
    """Call the kernel; how far it is off, as a share of what rounding may be.

    A row may be off by four times what the layer itself is, by some roundings of its largest
    number, and by what a sum in float32 of one number after the other is off by. Raises WrongError.
    """
    with torch.inference_mode():
        own = layer.module(given)
        exact = layer.exact(given.double()).double()
    worst = 0.0
    for count in threads.COUNTS if given.device.type == "cpu" else (torch.get_num_threads(),):
        with torch.inference_mode(), threads.of_torch(count):
            found = called(layer, given, own)
        try:
            worst = max(worst, _off(layer, given, found.double(), own.double(), exact))
        except WrongError as error:
            raise WrongError(f"{threads.on(count)}: {error}") from None
    return worst


def _off(
    layer: Layer, given: torch.Tensor, found: torch.Tensor, own: torch.Tensor, exact: torch.Tensor
) -> float:
    """How far off an output is, as a share of what rounding may be. Raises WrongError above it."""
    scale = exact.abs().amax(-1)
    # Layers of transformers compute in float32, also in float64.
    eps = max(torch.finfo(dtype).eps for dtype in (layer.dtype, torch.float32))
    rounding = 8 * eps + of_a_sum(given.shape[-1])
    allowed = 4 * (own - exact).abs().amax(-1) + rounding * scale
    off = (found - exact).abs().amax(-1)
    if (bad := ~(off <= allowed)).any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise WrongError(
            f"row {_at(at)} of {_times(given.shape[:-1])} is off by {float(off[at]):.3g} (at most "
            f"{float(allowed[at]):.2g} is rounding): {_why(layer, given, found, exact, at)}"
        )
    return float((off / allowed.clamp(min=1e-300)).max())


def _at(at: tuple[int, ...]) -> str:
    return str(at[0]) if len(at) == 1 else str(list(at))


def _times(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))


def called(layer: Layer, given: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """What the kernel returns for `given`, where the layer returns `own`; the form is checked."""
    weights = {f"parameter {n!r}": p.data for n, p in layer.module.named_parameters()}
    lent = Snapshot(**{"input": given, **weights})
    found = layer.fused(given)
    if not isinstance(found, torch.Tensor):
        raise WrongError(f"it must return a tensor as the layer does, not {type(found).__name__}")
    if found.shape != own.shape:
        raise WrongError(f"it returns {list(found.shape)}, and {list(own.shape)} is due")
    if found.dtype != own.dtype or found.device != own.device:
        raise WrongError(
            f"it returns {found.dtype} on {found.device}, and {own.dtype} on {own.device} is due"
        )
    lent.check()
    lent.check_own(found)
    return found


def _why(
    layer: Layer, given: torch.Tensor, found: torch.Tensor, exact: torch.Tensor, at: tuple[int, ...]
) -> str:
    """Which usual mistake it is, of the first row that is wrong."""
    mine, right = found[at], exact[at]
    if not bool(mine.isfinite().all()):
        return "it is not finite"
    if not bool(mine.any()):
        return "it is all 0: nobody wrote it"
    rows = exact.reshape(-1, exact.shape[-1])
    near = 0.02 * float(right.abs().max())
    twins = ((rows - mine).abs().amax(-1) < near).nonzero().flatten().tolist()
    if twins and not torch.equal(rows[twins[0]], right):
        return f"it is what row {twins[0]} should be"
    if torch.equal(mine, given[at].double()):
        return "it is the input, unchanged"
    if count := _left_out(layer, given, mine, right, at):
        return f"columns from {count} on are left out of what is summed over a row"
    ratio = mine / right
    middle = float(ratio.median())
    if float((ratio - middle).abs().max()) < 0.02 * abs(middle):
        return f"all of it is {middle:.3g} times what it should be"
    return _by_column(layer, mine, right, near)


def _left_out(
    layer: Layer, given: torch.Tensor, mine: torch.Tensor, right: torch.Tensor, at: tuple[int, ...]
) -> int:
    """From which column on nothing is summed; 0: it is something else."""
    off = float((mine - right).abs().max())
    for block in (8, 16, 32, 64, 128):
        count = given.shape[-1] // block * block
        if not 0 < count < given.shape[-1] or len(mine) != given.shape[-1]:
            continue
        cut = given[at].double().clone()
        cut[count:] = 0
        with torch.inference_mode():
            other = layer.exact(cut).double()
        if bool(mine[count:].any()) and float((mine - other)[:count].abs().max()) < 0.2 * off:
            return count
    return 0


def _by_column(layer: Layer, mine: torch.Tensor, right: torch.Tensor, near: float) -> str:
    bad = ((mine - right).abs() > near).nonzero().flatten().tolist()
    if not bad:
        return "all of it a little: a sum, or a product, is rounded more than the layer's"
    if bad[0] > 0 and bad == list(range(bad[0], len(right))):
        return f"from column {bad[0]} on: the rest of a row is not computed"
    for name, weight in layer.module.named_parameters():
        if weight.dim() == 1 and weight.shape == right.shape:
            own = weight.detach().double()
            for what, made in (
                (f"the {name} is left out", right / own),
                (f"1 is added to the {name}", right / own * (own + 1)),
                (f"1 is not added to the {name}", right / (own + 1) * own),
                (f"the {name} is left out, and the 1 before it", right / (own + 1)),
            ):  # fmt: skip
                if float((mine - made).abs().max()) < 0.05 * float(made.abs().max()):
                    return what
    return f"in {len(bad)} of {len(right)} columns, {bad[0]} first; no usual mistake explains it"
