"""Are a contender's tokens those of the model? By how far each is from the best one: its regret.

The reference is the model computed in float32 by its own eager attention, without any backend, on
the prompt and the tokens that were chosen. A token's regret is by how much its logit is below the
best one. Greedy tokens have none but for rounding: in float32 next to nothing, in another dtype at
most twice as much as rounding moves a logit, which is measured on the same tokens with the model in
that dtype. Backends that round on purpose (quantizers, some caches) are further off; what they
choose must still be among the best, on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Of the logits' own spread (their standard deviation): how far a token may be below the best one
#: in float32, and beside the measured rounding in another dtype.
SHARE = 0.002
#: How many times the measured rounding a logit may move: batches and kernels sum in other orders.
TIMES = 1.5
#: How far below the best tokens may be on average, in spreads, where a backend rounds on purpose;
#: tokens that have nothing to do with the model are 2 to 5 below.
LOSSY = 0.5


@dataclass(frozen=True)
class Regret:
    """Of one text, in the logits' spreads: the worst token's, and the mean.

    `rounding` is how far the same dtype moves a logit of the plain model, at most.
    """

    worst: float
    mean: float
    rounding: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def regrets(
    model: Mapping[str, Any], dtype: str, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[dict[str, Any]]:
    """The regret of each text (prompt, new tokens) by the model in float32, as dicts.

    `model` are the arguments of `jackfield.load` that say which it is; `dtype` is the one that the
    tokens were computed in.
    """
    exact = _logits({**model, "dtype": "float32"}, texts)
    own = exact if dtype == "float32" else _logits({**model, "dtype": dtype}, texts)
    return [
        _regret(whole, rounded, new).to_dict()
        for whole, rounded, (_, new) in zip(exact, own, texts, strict=True)
    ]


def _logits(
    arguments: Mapping[str, Any], texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[torch.Tensor]:
    """What the plain model says of each new token: float32 `[new tokens, vocab]` of each text."""
    from jackfield.api import load
    from jackfield.bridge.recomputation import Recomputation

    with load(**arguments, cache_implementation="dynamic", compile="none") as engine:
        model = engine.model
    again = Recomputation(model, ())  # the engine has given it back as it was
    return [again([*prompt, *new[:-1]], len(new))[0].logits.float().cpu() for prompt, new in texts]


def _regret(exact: torch.Tensor, own: torch.Tensor, new: Sequence[int]) -> Regret:
    spread = exact.std(1)
    chosen = exact[range(len(new)), list(new)]
    below = (exact.amax(1) - chosen) / spread
    moved = (own - exact).abs().amax(1) / spread
    return Regret(*(float(numbers) for numbers in (below.max(), below.mean(), moved.max())))


def reason_against(found: Sequence[Mapping[str, float]], *, lossy: bool) -> str | None:
    """Why the tokens of texts with these regrets are not the model's; None: they are."""
    mean = sum(one["mean"] for one in found) / len(found)
    if lossy:
        if mean <= LOSSY:
            return None
        return f"wrong tokens: {mean:.2g} spreads of the logits below the best ones, on average"
    wrong = [one for one in found if not one["worst"] <= allowed(one)]
    if not wrong:
        return None
    one = max(wrong, key=lambda one: one["worst"])
    return (
        f"wrong tokens in {len(wrong)} of {len(found)} texts: up to {one['worst']:.2g} spreads of "
        f"the logits below the best one, where rounding explains {allowed(one):.2g}"
    )


def allowed(one: Mapping[str, float]) -> float:
    """The most regret that rounding explains, in spreads."""
    return SHARE + 2 * TIMES * float(one["rounding"])
