"""Plain decoding of the kit's own, and engines that run it: what texts are compared with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch

from jackfield.api import load
from jackfield.contracts import (
    SAMPLER_SETTINGS,
    BindContext,
    Decoding,
    DecodingCapabilities,
    Sequence,
    Strategy,
)
from jackfield.engine.completions import Completion
from jackfield.engine.engine import Engine
from jackfield.testing.checks import WrongError
from jackfield.testing.models import build
from jackfield.testing.subject import uninstalled


class Plain(Decoding):
    """One token at a time, by the sampler alone."""

    name = "plain-of-the-kit"
    capabilities = DecodingCapabilities(settings=SAMPLER_SETTINGS)

    def bind(self, context: BindContext) -> Strategy:
        return _NoDrafts()


class _NoDrafts(Strategy):
    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        return [[] for _ in sequences]


@contextlib.contextmanager
def plain_engine(model: Any, **arguments: Any) -> Iterator[Engine]:
    """An engine that decodes plainly."""
    with (
        uninstalled(Plain()) as own,
        load(model, decoding=own.selection, **arguments) as engine,
    ):
        yield engine


@functools.cache
def exact(seed: int) -> Any:
    """A model in float64, in which no two ways of computing choose another token."""
    return build("grouped_query", torch.float64, seed)


def compare(found: Seq[Completion], right: Seq[Completion], when: str) -> None:
    """Raise WrongError that names the first place where texts differ."""
    for number, (one, other) in enumerate(zip(found, right, strict=True)):
        if one.error is not None:
            raise WrongError(f"request {number} ended by an error {when}: {one.error}")
        if one.token_ids != other.token_ids:
            raise WrongError(f"{_parting(one.token_ids, other.token_ids, number)} {when}")
        if one.finish_reason != other.finish_reason:
            raise WrongError(
                f"request {number} ends by {one.finish_reason!r}, and by plain decoding by "
                f"{other.finish_reason!r}, {when}"
            )
        if one.text != other.text:
            raise WrongError(f"request {number} has the right tokens and another text {when}")
        _compare_logprobs(one, other, f"request {number} {when}")
        for name in ("logits", "scores"):
            _compare_told(
                getattr(one, name), getattr(other, name), f"{name} of request {number} {when}"
            )


def _compare_logprobs(one: Completion, other: Completion, where: str) -> None:
    if len(one.logprobs) != len(other.logprobs):
        raise WrongError(f"{where} has {len(one.logprobs)} logprobs of {len(other.logprobs)}")
    for at, (mine, right) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        if mine.token_id != right.token_id or not abs(mine.logprob - right.logprob) < 1e-4:
            raise WrongError(f"the logprob of new token {at} of {where} is {mine}, not {right}")


def _compare_told(mine: torch.Tensor | None, right: torch.Tensor | None, what: str) -> None:
    if mine is None or right is None:
        if mine is not right:
            missing = "missing" if mine is None else "there, and were not asked for"
            raise WrongError(f"the {what} are {missing}")
    elif mine.shape != right.shape or not torch.allclose(mine, right, rtol=1e-4, atol=1e-4):
        raise WrongError(f"the {what} are not those of plain decoding")


def _parting(found: list[int], right: list[int], number: int) -> str:
    pairs = zip(found, right, strict=False)
    at = next((i for i, (f, r) in enumerate(pairs) if f != r), None)
    if at is None:
        return (
            f"the text of request {number} has {len(found)} tokens, and {len(right)} by plain "
            "decoding"
        )
    return (
        f"the text of request {number} is not that of plain decoding: new token {at} is "
        f"{found[at]}, not {right[at]}"
    )
