"""A rotation, held to the function that the layer itself calls, in float64."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.testing.checks import WrongError
from jackfield.testing.kernel.turning import Turning
from jackfield.testing.watching import Snapshot

Pair = tuple[torch.Tensor, torch.Tensor]


def held(turning: Turning, given: list[torch.Tensor]) -> float:
    """Rotate by both; how far it is off, as a share of what rounding may be. Raises WrongError.

    A head may be off by four times what the layer's own is, and by some roundings of its largest
    number.
    """
    lent = Snapshot(**dict(zip(("queries", "keys", "cosines", "sines"), given, strict=True)))
    with torch.inference_mode():
        due = turning.own(*given)
        if due[0].dtype != given[0].dtype:  # such a layer is given no wider angles
            return 0.0
        exact = turning.own(*(one.double() for one in given))
        found = turning.made(*given)
    lent.check()
    worst = 0.0
    for number, (new, one, right) in enumerate(zip(pair_of(found), due, exact, strict=True)):
        what = ("queries", "keys")[number]
        if (new.shape, new.dtype, new.device) != (one.shape, one.dtype, one.device):
            raise WrongError(
                f"{what} become {new.dtype} {list(new.shape)} on {new.device}, and {one.dtype} "
                f"{list(one.shape)} on {one.device} is due"
            )
        lent.check_own(new)
        rounding = 8 * torch.finfo(one.dtype).eps * right.abs().amax(-1)
        allowed = 4 * (one - right).abs().amax(-1) + rounding
        off = (new.double() - right).abs().amax(-1)
        if (bad := ~(off <= allowed)).any():
            at = tuple(int(i) for i in bad.nonzero()[0])
            raise WrongError(
                f"head {at[1]} of the {what} of token {at[2]} of text {at[0]} is off by "
                f"{float(off[at]):.3g} (at most {float(allowed[at]):.2g} is rounding): "
                f"{_why(turning, given, number, new.double(), at)}"
            )
        worst = max(worst, float((off / allowed.clamp(min=1e-300)).max()))
    return worst


def pair_of(found: Any) -> Pair:
    """Raise WrongError unless it is two tensors."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise WrongError(f"it must return queries and keys, not {type(found).__name__}")
    for one in found:
        if not isinstance(one, torch.Tensor):
            raise WrongError(f"it must return two tensors, not a {type(one).__name__}")
    return found[0], found[1]


def _why(
    turning: Turning, given: list[torch.Tensor], number: int, new: torch.Tensor, at: tuple[int, ...]
) -> str:
    """Which usual mistake it is, of the first head that is wrong."""
    mine, states = new[at], given[number].double()
    if not bool(mine.isfinite().all()):
        return "it is not finite"
    if not bool(mine.any()):
        return "it is all 0: nobody wrote it"
    if torch.equal(mine, states[at]):
        return "it is not turned"
    q, k, cos, sin = (one.double() for one in given)
    others = {
        "it is turned the other way": (cos, -sin),
        "it is turned by the first token's angles": (_first(cos, 1), _first(sin, 1)),
        "it is turned by the first text's angles": (_first(cos, 0), _first(sin, 0)),
        "sines and cosines change places": (sin, cos),
    }
    neighbours = torch.stack((-states[..., 1::2], states[..., ::2]), -1).flatten(-2)
    each = [one[..., : one.shape[-1] // 2].repeat_interleave(2, -1) for one in (cos, sin)]
    right, near = turning.own(q, k, cos, sin)[number], 0.02 * float(states[at].abs().max())

    def is_like(other: torch.Tensor) -> bool:
        return bool((mine - other).abs().max() < near < (right[at] - other).abs().max())

    if any(is_like(_paired(states, neighbours, *two)[at]) for two in ((cos, sin), each)):
        return "neighbours of a head are turned, and its halves are due"
    if q.shape == k.shape and is_like(turning.own(q, k, cos, sin)[1 - number][at]):
        return "queries and keys change places"
    for what, angles in others.items():
        if is_like(turning.own(q, k, *angles)[number][at]):
            return what
    turned = cos.shape[-1]
    rest = right[at][turned:]
    if torch.equal(rest, states[at][turned:]) and not torch.equal(mine[turned:], rest):
        return f"numbers from {turned} on stay as they are: cosines and sines have no more"
    same = ((right - mine).abs().amax(-1) < near).nonzero().tolist()
    if same and same[0] != [*at]:
        text, head, token = same[0]
        return f"it is what head {head} of token {token} of text {text} should be"
    bad = ((mine - right[at]).abs() > near).nonzero().flatten().tolist()
    if bad and bad[0] > 0 and bad == list(range(bad[0], len(mine))):
        return f"from number {bad[0]} of the head on"
    where = f"in {len(bad)} of its {len(mine)} numbers, {bad[0]} first" if bad else "a little"
    if len(bad) > len(mine) // 2:
        return f"{where}; no usual mistake explains it"
    return f"{where}; a product, or an angle, is rounded more"


def _paired(
    states: torch.Tensor, crossed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    if cos.shape[-1] != states.shape[-1]:
        return states
    return states * cos[:, None] + crossed * sin[:, None]


def _first(angles: torch.Tensor, dim: int) -> torch.Tensor:
    return angles.narrow(dim, 0, 1).expand_as(angles)
