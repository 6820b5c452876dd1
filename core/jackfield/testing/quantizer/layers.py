"""Checks of layers by themselves: each against the whole weights, in every declared dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from jackfield.testing import threads
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.quantizer.diagnosis import SCALE, fault_of, listed, multiplied_with
from jackfield.testing.quantizer.loads import Layer, Loads

#: How many rows a layer is given at once: one token, few, more than a tile, long prompts.
ROWS = (1, 2, 65, 1000, 1025, 4097)

#: Few numbers, and odd ones, may be so many times further off than what is declared.
FEW = 1.5

#: A single output or input may be so many times further off than the whole layer.
SINGLE = 2.5

SHAPES: dict[str, Callable[[Layer], torch.Tensor]] = {
    "[3, 5, in]": lambda layer: layer.inputs(3, 5),
    "[1, 7, in]": lambda layer: layer.inputs(1, 7),
    "[2, 3, 2, in]": lambda layer: layer.inputs(2, 3, 2),
    "[8, in], every other row of 16": lambda layer: layer.inputs(16)[::2],
    "[8, in], every other column": lambda layer: layer.inputs(8, 2).transpose(1, 2).flatten(
        1
    )[:, : 2 * layer.weight.shape[1]].unflatten(1, (-1, 2))[..., 0],
    "[5, in], transposed": lambda layer: layer.inputs(5).T.contiguous().T,
    "[4, in], expanded from one row": lambda layer: layer.inputs(1).expand(4, -1),
}  # fmt: skip


def checks(loads: Loads) -> Iterator[Check]:
    """All of them; where nothing is stored there are no layers, and they are not tried."""
    for dtype in loads.dtypes():
        yield Check(
            f"layers.{dtype}.error",
            f"relative_error, dtypes: {dtype}",
            _each(loads, dtype, _error),
            cases=ROWS,
            limit=240,
        )
        yield Check(
            f"layers.{dtype}.outputs_and_inputs",
            f"relative_error, dtypes: {dtype}",
            _each(loads, dtype, _single),
        )
        yield Check(f"layers.{dtype}.bias", f"dtypes: {dtype}", _each(loads, dtype, _bias))
        yield Check(
            f"layers.{dtype}.shapes",
            "contract",
            _each(loads, dtype, _shape),
            cases=tuple(SHAPES),
        )
        yield Check(f"layers.{dtype}.again", "contract", _each(loads, dtype, _again), cases=(1, 9))
    dtype = loads.dtype()
    yield Check("layers.rows_alone", "contract", _each(loads, dtype, _alone), cases=(2, 7, 65))
    yield Check(
        "layers.magnitudes",
        "contract",
        _each(loads, dtype, _magnitude),
        cases=(0.0, 1 / 64, 64.0),
    )
    yield Check("layers.odd_weights", "contract", _each(loads, dtype, _odd, "rows"))


def _each(
    loads: Loads,
    dtype: str,
    check: Callable[[Layer, Any, Loads], float | None],
    kind: str = "small",
) -> Callable[[Any], str | None]:
    def run(case: Any) -> str | None:
        name = loads.main(kind)
        if dtype != loads.dtype():
            loads.accepted(name, dtype)
        layers = loads.layers(name, dtype)
        if not layers:
            raise NotTriedError("it stores every weight as it is")
        worst = [found for layer in layers if (found := check(layer, case, loads)) is not None]
        return f"at most {max(worst):.2g} off" if worst else None

    return run


def told(layer: Layer, what: str, loads: Loads | None = None) -> WrongError:
    """The error of a layer; with `loads`, what may have gone wrong is looked for."""
    out_features, in_features = layer.weight.shape
    name = str(layer.dtype).removeprefix("torch.")
    others = {} if loads is None else dict(loads.original(loads.main()).matrices)
    fault = "" if loads is None else f": {fault_of(layer, others)}"
    return WrongError(f"{layer.path} ({out_features} × {in_features}, {name}) {what}{fault}")


def _error(layer: Layer, rows: int, loads: Loads) -> float:
    given = layer.inputs(rows)
    right, bound = layer.right(given), layer.bound(given)
    bound *= FEW if rows < 16 else 1  # few numbers vary more
    worst = 0.0
    for count in threads.COUNTS if given.device.type == "cpu" else (torch.get_num_threads(),):
        with threads.of_torch(count):
            own = output(layer, given)
        try:
            worst = max(worst, _off(layer, own, right, bound, loads))
        except WrongError as error:
            raise WrongError(f"{threads.on(count)}: {error}") from None
    return worst


def _off(layer: Layer, own: torch.Tensor, right: torch.Tensor, bound: float, loads: Loads) -> float:
    """How far off the outputs are, as a share of their size. Raises WrongError above `bound`."""
    rows, found = len(own), own.double() - layer.bias
    off = float((found - right).norm() / right.norm())
    by_rows = (found - right).norm(dim=1) / right.norm(dim=1)
    lost = ((by_rows > 3 * bound) | ~own.any(1)).nonzero().flatten().tolist()
    if 0 < len(lost) < rows:  # few of many hardly change the whole
        raise told(layer, f"is wrong in some rows: rows {listed(lost)} of {rows} are wrong")
    if not off <= bound:
        what = f"is off by {off:.3g} of its outputs' size, where {bound:.3g} is right"
        wrong = (by_rows > 2 * bound).nonzero().flatten().tolist()
        if 0 < len(wrong) < rows:
            raise told(layer, f"{what}: rows {listed(wrong)} of {rows} are wrong")
        raise told(layer, what, loads)
    return off


def output(layer: Layer, given: torch.Tensor) -> torch.Tensor:
    """Call a layer, which must return what the contract says and change nothing."""
    before = given.clone()
    out = layer(given)
    due = (layer.dtype, (*given.shape[:-1], len(layer.weight)), given.device)
    if not isinstance(out, torch.Tensor):
        raise told(layer, f"returns {type(out).__name__}, and no tensor")
    got = (out.dtype, tuple(out.shape), out.device)
    if got != due:
        raise told(
            layer,
            f"given {list(given.shape)} returns {got[0]} {list(got[1])} on {got[2]}, where {due[0]}"
            f" {list(due[1])} on {due[2]} is right",
        )
    if not torch.equal(given, before):
        raise told(layer, "changes the inputs that it was lent")
    return out


def _single(layer: Layer, _: object, loads: Loads) -> float:
    found, right = multiplied_with(layer), layer.weight
    eps = torch.finfo(layer.dtype).eps
    sums = eps * (right.abs() + layer.bias.abs()[:, None] / SCALE)
    worst = 0.0
    for axis, place in ((1, "output"), (0, "input")):
        size = right.norm(dim=axis)
        bound = torch.clamp(SINGLE * layer.error * size, max=0.95 * size) + sums.norm(dim=axis)
        off = (found - right).norm(dim=axis)
        if not (off <= bound + 1e-6 * size).all():
            at = int((off - bound).argmax())
            share, most = float(off[at] / size[at]), float(bound[at] / size[at])
            what = f"is off by {share:.3g} at {place} {at}, where {most:.3g} is right"
            raise told(layer, what, loads)
        worst = max(worst, float((off / size).max()))
    return worst


def _bias(layer: Layer, _: object, loads: Loads) -> None:
    nothing = torch.zeros(2, layer.weight.shape[1], dtype=layer.dtype)
    found = output(layer, nothing)[0].double()
    off = (found - layer.bias).abs()
    eps = _bias_eps(layer)
    if not (off <= 2 * eps * layer.bias.abs() + 1e-6).all():
        at = int(off.argmax())
        said = f"given zeros returns {float(found[at]):.4g} at output {at}"
        fault = ""
        if float(found.abs().max()) < 1e-6:
            fault = ": the bias is missing"
        elif torch.allclose(found, 2 * layer.bias, rtol=1e-2, atol=1e-3):
            fault = ": the bias is added twice"
        raise told(layer, f"{said}, where its bias {float(layer.bias[at]):.4g} is right{fault}")


def _bias_eps(layer: Layer) -> float:
    """A bias may be kept in float16, whatever the dtype of the model."""
    return max(torch.finfo(layer.dtype).eps, torch.finfo(torch.float16).eps)


def _shape(layer: Layer, case: str, _: Loads) -> None:
    given = SHAPES[case](layer)
    found = output(layer, given)
    flat = given.reshape(-1, given.shape[-1]).contiguous()
    plain = output(layer, flat).view(found.shape)
    if not _alike(found, plain, layer, flat):
        off = float((found.double() - plain.double()).norm() / plain.double().norm())
        raise told(
            layer,
            f"says something else of {case} than of the same rows in one dense matrix: {off:.3g} of"
            " their size",
        )


def _alike(one: torch.Tensor, other: torch.Tensor, layer: Layer, given: torch.Tensor) -> bool:
    """Equal but for rounding: of sums to the dtype, and of activations where these are rounded."""
    off = float((one.double() - other.double()).norm())
    size = float(other.double().norm())
    share = 4 * layer.rounding(given) + 0.5 * min(layer.error, 0.02)
    return off <= (share + 1e-6) * size + 1e-6


def _again(layer: Layer, rows: int, _: Loads) -> None:
    """The same inputs many times, others between: nothing is kept, nothing of a result changes."""
    given = layer.inputs(rows)
    first = output(layer, given)
    kept = first.clone()
    for number in range(8):
        other = layer.inputs(rows, seed=number + 1)
        if torch.equal(output(layer, other), kept):
            raise told(layer, "returns its first outputs for other inputs too")
        if not torch.equal(first, kept):
            raise told(layer, "writes a call's outputs over those that it returned before")
        if not torch.equal(output(layer, given), kept):
            raise told(layer, f"returns other outputs for the same inputs in call {2 * number + 3}")
    many = [layer.inputs(64 * rows, seed=seed) for seed in (1, 2)]
    if not threads.are_alone([partial(layer, one) for one in many]):
        raise told(
            layer,
            "returns other outputs while another thread calls it: calls share memory that each of "
            "them needs for itself",
        )


def _alone(layer: Layer, rows: int, loads: Loads) -> None:
    given = layer.inputs(rows)
    together = output(layer, given)
    exact = loads.backend.capabilities.batch_invariant
    for row in {0, rows // 2, rows - 1}:
        one = output(layer, given[row : row + 1])[0]
        if exact and not torch.equal(one, together[row]):
            raise told(
                layer,
                f"has other bits for row {row} of {rows} than for that row alone, and declares "
                "batch_invariant",
            )
        if not _alike(one, together[row], layer, given):
            off = float((one.double() - together[row].double()).norm() / one.double().norm())
            raise told(layer, f"is {off:.3g} off between row {row} of {rows} and that row alone")


def _magnitude(layer: Layer, factor: float, loads: Loads) -> float | None:
    given = layer.inputs(3)
    given[1] *= factor
    found = output(layer, given)[1].double() - layer.bias
    if not found.isfinite().all():
        raise told(layer, f"returns no finite numbers for inputs of {factor:g}")
    right = layer.right(given)[1]
    if factor == 0:
        if float(found.abs().max()) >= 1e-2:
            raise told(layer, "does not return its bias for a row of zeros among others")
        return None
    off = float((found - right).norm() / right.norm())
    bound = SINGLE * layer.error + 2 * layer.rounding(given[1:2]) + 1e-5
    if not off <= bound:
        raise told(layer, f"is off by {off:.3g} for a row {factor:g} times as large as its "
                   f"neighbours, where {bound:.3g} is right")  # fmt: skip
    return off


def _odd(layer: Layer, _: object, loads: Loads) -> None:
    """Rows of zeros, constant ones, of one sign, with a number that is large beside the others."""
    found, right = multiplied_with(layer), layer.weight
    if not found.isfinite().all():
        raise told(layer, "with odd weights multiplies with numbers that are not finite")
    zero = right.abs().amax(1) == 0
    eps = torch.finfo(layer.dtype).eps
    slack = 2 * _bias_eps(layer) * layer.bias.abs() / SCALE + 1e-6
    if (found[zero].abs() > slack[zero][:, None]).any():
        raise told(layer, "does not keep the outputs zero whose weights are zeros")
    if right.abs().max() > 20:  # the outlier spoils its group, and nothing beyond its row
        right, found, slack = right[8:], found[8:], slack[8:]
    off = float((found - right).norm() / right.norm())
    bound = FEW * layer.error + float(slack.norm() / right.norm()) * right.shape[1] ** 0.5 + eps
    if not off <= bound:
        kind = "of one sign" if (right >= 0).all() or (right <= 0).all() else "zero or constant"
        raise told(layer, f"is off by {off:.3g} with rows that are {kind}, where {bound:.3g} is "
                   "right")  # fmt: skip
