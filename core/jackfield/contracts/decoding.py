"""The decoding kind: which tokens come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, names
from jackfield.contracts.requirements import Requirements

if TYPE_CHECKING:
    import torch

    from jackfield.sequences import Sequence, Step, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class DecodingCapabilities:
    """What a strategy declares.

    `settings` are the names of the generation settings that it honours, beyond those that the
    loop itself honours (lengths, stops); any other setting in a request is refused by name.
    `rollback`: it feeds tokens that may be taken back.
    """

    settings: frozenset[str] = field(default_factory=frozenset)
    rollback: bool = False

    def __post_init__(self) -> None:
        names(self.settings, "setting")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens that one sequence gained in a step (none while its prompt is still being fed).

    `error` ends this request, and only this one.
    """

    tokens: Seq[int] = ()
    logprobs: Seq[TokenLogprob] = ()
    error: str | None = None


class Strategy(ABC):
    """A bound decoding strategy. The loop calls `propose`, runs the model, and calls `accept`."""

    @abstractmethod
    def propose(self, sequences: Seq[Sequence]) -> list[list[int]]:
        """Draft tokens to verify, one list per sequence (empty lists: plain decoding)."""

    @abstractmethod
    def accept(self, step: Step, logits: torch.Tensor) -> list[Accepted]:
        """Choose tokens for each feed of `step`.

        `logits` is `[len(step.feeds), k, vocab]` in the model's dtype and may be modified in
        place. A feed that does not reach the end of its sequence gets no token. Exactly one
        device-to-host copy a call. Exact for each request's target distribution.
        """

    def release(self, sequences: Seq[Sequence]) -> None:  # noqa: B027 - optional
        """Forget what is kept for these sequences."""


class Decoding(Backend):
    """Which tokens come next. `bind` is called once per model."""

    kind: ClassVar[str] = "decoding"
    bound: ClassVar[tuple[type, ...]] = (Strategy,)
    capabilities: ClassVar[DecodingCapabilities]

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        del options
        return replace(requirements, rollback=self.capabilities.rollback)

    @abstractmethod
    def bind(self, context: BindContext) -> Strategy:
        """Return the strategy for `context.model`."""

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), DecodingCapabilities):
            found.append("`capabilities` must be a DecodingCapabilities")
        return found
