"""Whether a text is right: the tokens of plain `generate`, or as good as its own to rounding."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import Any

import torch

Tokens = list[list[int]]
_BEST = 8


def generated(model: Any, prompts: Tokens, count: int) -> Tokens:
    """Greedy tokens of plain transformers, one prompt at a time, by the model as it is."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        output = model.generate(ids, **kwargs, max_new_tokens=count, do_sample=False)
        found.append(output[0, len(prompt) :].tolist())
    return found


def regret(model: Any, prompts: Tokens, texts: Tokens) -> float:
    """By how much the logit of a token that was chosen is below the best one, at most.

    Each text is read again by `model` in one piece, after the tokens that were chosen before.
    """
    worst = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt + text], device=model.device)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(text) + 1).logits[0, :-1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((logits.max(-1).values - chosen).max()))
    return worst


def bound_of(model: Any, prompts: Tokens) -> float:
    """How much of `regret` the dtype of a model alone makes, of greedy texts that are right.

    Four times what its own logits are off behind `prompts`, by a copy of it that is twice as wide:
    two logits in the text's own steps, and the same two in those of `model`, which judges it. Only
    the `_BEST` of a position count, among which a right text chooses.
    """
    wide = copy.deepcopy(model).to(torch.float64 if model.dtype.itemsize > 2 else torch.float32)
    worst = 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            right, at = wide(ids).logits.topk(_BEST)
            off = model(ids).logits.gather(-1, at).double() - right.double()
        worst = max(worst, float(off.abs().max()))
    return 4 * worst


def verdict(
    model: Any, prompts: Tokens, expected: Tokens, found: Tokens, bound: float
) -> dict[str, Any]:
    """Equal tokens, or texts of the same lengths that regret no more than `bound`."""
    if found == expected:
        return {"ok": True, "tokens": "equal"}
    whole = [len(text) for text in found] == [len(text) for text in expected]
    lost = regret(model, prompts, found) if whole else float("inf")
    return {"ok": lost <= bound, "tokens": parted(expected, found), "regret": lost, "bound": bound}


def parted(expected: Tokens, found: Tokens) -> str:
    """Where two sets of texts part."""
    rows = zip(expected, found, strict=False)
    first = [_common(a, b) for a, b in rows if a != b]
    return f"{len(first)} of {len(expected)} part, the first at token {min(first, default=0)}"


def _common(one: Seq[int], other: Seq[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
