"""What is wrong with a layer, by the matrix that it multiplies with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jackfield.testing.quantizer.loads import Layer

SCALE = 4.0  # of the unit vectors: below what a quantizer of activations takes for an outlier

#: A mistake holds where what is left of the difference is less than this share of the weights.
LEFT = 0.4


def multiplied_with(layer: Layer) -> torch.Tensor:
    """The matrix, float64 `[out_features, in_features]`: what unit vectors say, less the bias."""
    size = layer.weight.shape[1]
    units = SCALE * torch.eye(size, dtype=layer.dtype)
    return ((layer(units).double() - layer.bias) / SCALE).T


def fault_of(layer: Layer, others: dict[str, torch.Tensor]) -> str:
    """In the field's words; `others` are the matrices of the model, by path."""
    found, right = multiplied_with(layer), layer.weight
    if not found.isfinite().all():
        return "it multiplies with numbers that are infinite or not a number"
    size = float(right.norm())
    off = float((found - right).norm()) / size
    if float(found.norm()) < 1e-3 * size:
        return "its weights are zeros, as if nobody had filled them"
    for name, other in (*_mistakes(right), *_strangers(layer, others)):
        if float((found - other).norm()) / size < min(LEFT, off / 2, max(0.02, 2 * layer.error)):
            return name
    return _places(layer, found) or _spread(found, right, off) or "the differences lie everywhere"


def _mistakes(right: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    rows, columns = right.shape
    if rows == columns:
        yield "its matrix is transposed", right.T
    yield "its weights have the other sign", -right
    yield "each two neighbouring inputs are exchanged (the halves of a byte?)", _swapped(right)
    yield "each two neighbouring outputs are exchanged", _swapped(right.T).T
    for step in (1, -1):
        yield f"its inputs are {step} further", right.roll(step, 1)
        yield f"its outputs are {step} further", right.roll(step, 0)
    yield "its inputs are in reverse order", right.flip(1)
    yield "its outputs are in reverse order", right.flip(0)
    yield "numbers are laid out by columns where rows are meant", right.T.reshape(rows, columns)


def _swapped(matrix: torch.Tensor) -> torch.Tensor:
    order = torch.arange(matrix.shape[1])
    even = matrix.shape[1] // 2 * 2
    order[:even] ^= 1
    return matrix[:, order]


def _strangers(layer: Layer, others: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, matrix in others.items():
        if path != layer.path and matrix.shape == layer.weight.shape:
            yield f"it has the weights of {path}", matrix


def _places(layer: Layer, found: torch.Tensor) -> str:
    """Where few outputs or few inputs are wrong: which."""
    for what, axis in (("outputs", 1), ("inputs", 0)):
        errors = (found - layer.weight).norm(dim=axis) / layer.weight.norm(dim=axis).clamp(min=1e-9)
        usual = float(errors.median())
        wrong = (errors > max(3 * usual, 3 * layer.error, 0.02)).nonzero().flatten().tolist()
        if 0 < len(wrong) <= len(errors) // 2:
            zeros = found.norm(dim=axis)[wrong].max() < 1e-6
            return f"{what} {listed(wrong)} of {len(errors)} are {'zero' if zeros else 'wrong'}"
    return ""


def listed(numbers: list[int]) -> str:
    """Which these are, ascending: "64 to 127", or the first of them."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    some = ", ".join(map(str, numbers[:4]))
    return some if len(numbers) <= 4 else f"{some} and {len(numbers) - 4} more"


def _spread(found: torch.Tensor, right: torch.Tensor, off: float) -> str:
    """A factor, an offset, a bound: what is wrong with all numbers in the same way."""
    size = float(right.norm())
    factor = float((found * right).sum()) / size**2
    if abs(factor - 1) > 0.02 and float((found - factor * right).norm()) < 0.7 * off * size:
        return f"its weights are {factor:.3g} times those of the file (a scale?)"
    offset = float((found - right).mean())
    if float((found - right - offset).norm()) < 0.8 * off * size:
        return f"each of its weights is {offset:+.3g} off (a zero point, or rounding one way?)"
    most = float(found.abs().max())
    clipped = right.clamp(-most, most)
    if most < 0.8 * float(right.abs().max()) and float((found - clipped).norm()) < 0.7 * off * size:
        return f"its weights are cut off at {most:.3g}, and the file has {right.abs().max():.3g}"
    return ""
