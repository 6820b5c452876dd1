"""Log-probabilities under the model itself, before any setting is applied."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jackfield.contracts import TokenLogprob
from jackfield.sampling.stage import precise

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LESS = 2.0**-50  # of a number in float64, where float32 tells apart what differs by 2**-24


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """A new tensor of `logits` `[rows, vocab]`, in float32, or in float64 where they are."""
    return torch.log_softmax(precise(logits), -1)


def columns(raw: torch.Tensor, tokens: torch.Tensor, most: int) -> list[torch.Tensor]:
    """`[rows]` each: the token's log-probability, the ids of the `most` likeliest, and theirs.

    `raw` is what `log_probabilities` gave, `tokens` is int64 `[rows]`. Of equal ones the first ids
    come first: which of them `topk` takes depends on how many the others in a batch want. (On MPS,
    which has no float64, it is as `topk` has it.)
    """
    ranked = raw
    if raw.device.type not in ("cpu", "mps"):
        ids = torch.arange(raw.shape[-1], dtype=torch.float64, device=raw.device)
        ranked = raw * (1 + ids * _LESS)  # below 0 all of them
    chosen = ranked.topk(most, -1).indices
    if most and raw.device.type == "cpu":
        chosen = torch.from_numpy(np.stack(list(map(_firsts, raw.numpy(), chosen.numpy()))))
    return [raw.gather(1, tokens[:, None])[:, 0], *chosen.T, *raw.gather(1, chosen).T]


def _firsts(row: NDArray[Any], top: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many ids as `top`, the likeliest and of equal ones the first."""
    among = np.flatnonzero(row >= row[top[-1]])
    if len(among) < len(top):  # something is no number
        return top
    return among[np.argsort(-row[among], kind="stable")][: len(top)]


def entry(token: int, numbers: Seq[float], wanted: int) -> TokenLogprob:
    """What a request that asked for `wanted` gets; `numbers` are a row of `columns`."""
    most = (len(numbers) - 1) // 2
    pairs = zip(numbers[1 : 1 + wanted], numbers[1 + most : 1 + most + wanted], strict=True)
    return TokenLogprob(token, numbers[0], tuple((int(i), value) for i, value in pairs))
