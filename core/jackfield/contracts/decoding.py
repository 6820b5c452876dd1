"""The decoding kind: which tokens come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, names
from jackfield.contracts.requirements import Requirements
from jackfield.contracts.sequences import BeamGroup, Hypothesis, Sequence
from jackfield.contracts.settings import Settings

if TYPE_CHECKING:
    import torch

#: The generation settings that the sampler honours, which chooses the tokens of every strategy.
SAMPLER_SETTINGS = frozenset(
    {
        "bad_words_ids", "do_sample", "frequency_penalty", "logits_processor", "logprobs",
        "min_length", "min_new_tokens", "min_p", "prefix_allowed_tokens_fn", "presence_penalty",
        "repetition_penalty", "seed", "sequence_bias", "stopping_criteria", "suppress_tokens",
        "temperature", "top_k", "top_p",
    }
)  # fmt: skip

#: Those that a strategy is handed in `settings.drafts` and `settings.beams`.
DRAFT_SETTINGS = frozenset(
    {
        "assistant_confidence_threshold", "max_matching_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "prompt_lookup_num_tokens",
    }
)  # fmt: skip
BEAM_SETTINGS = frozenset(
    {"diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups", "num_beams"}
)


@dataclass(frozen=True, kw_only=True)
class DecodingCapabilities:
    """What a strategy declares.

    `settings` are the names of the generation settings that it honours, beyond those that the
    loop itself honours (lengths, stops); any other setting in a request is refused by name.
    `rollback`: it proposes drafts, tokens that may be taken back; without it nobody asks it to.
    `assistant`: it needs a draft model. `forks`: it is a `Search`, which goes on with copies of a
    sequence.
    """

    settings: frozenset[str] = field(default_factory=frozenset)
    rollback: bool = False
    assistant: bool = False
    forks: bool = False

    def __post_init__(self) -> None:
        names(self.settings, "setting")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the model itself, before any setting is applied.

    `top` holds (token id, log-probability) of the likeliest tokens, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens that one sequence gained in a step (none while its prompt is still being fed).

    `error` ends this request, and only this one. `ends`: nothing may follow these tokens.
    """

    tokens: Seq[int] = ()
    logprobs: Seq[TokenLogprob] = ()
    error: str | None = None
    ends: bool = False


class Strategy(ABC):
    """A bound decoding strategy: it guesses, and the loop's sampler decides.

    The loop feeds a guess behind a sequence's last token and asks the sampler at each position
    what plain decoding would say there. Drafts are kept for as long as they are the same, so a
    wrong guess costs time and never changes a text.

    `worth` is the share of its drafts that must be kept for them to pay; a request where they do
    not is left alone for a while.
    """

    worth: float = 0.0

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[list[int]]:
        """Draft tokens to verify, one list per sequence (empty: none), at most `most[i]` (>= 1).

        `sequences` are those that decode now and chose this strategy. Nothing of them may be
        changed. Called in the loop's thread, once a step at most.
        """

    def refuse(self, prompt_length: int) -> str | None:
        """Why it can never propose anything for a request; None: it can.

        Asked of requests that name the strategy; one that has it by default goes without drafts.
        """
        del prompt_length
        return None

    def release(self, sequences: Seq[Sequence]) -> None:  # noqa: B027 - optional
        """Forget what is kept for these sequences; unknown ones are ignored."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text goes on: with what beam number `parent` of its group has, then `token`.

    `score` is what the next scores of this beam are added to.
    """

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What a group does next: it goes on with `beams`; where there are none, it has ended.

    `beams` are at most as many as the group has members, and may have parents in common; the first
    are told of a search that is cut off. `hypotheses` are all that are worth keeping, best first.
    `error` ends the request.
    """

    beams: Seq[Continuation] = ()
    hypotheses: Seq[Hypothesis] = ()
    error: str | None = None


class Search(Strategy):
    """A bound strategy that goes on with several texts of one request at once: its beams.

    A request begins as one beam that reads the prompt. Each step feeds every beam of a group its
    last token; then `decide` says which continuations the group goes on with. The loop copies
    what is cached for those that have a parent in common, and drops what nobody goes on with.
    """

    @abstractmethod
    def width(self, settings: Settings) -> int:
        """How many beams a request has at most (>= 1); its group has as many members.

        Raises SettingsError where its settings do not fit together.
        """

    @abstractmethod
    def decide(self, groups: Seq[BeamGroup], scores: Seq[torch.Tensor]) -> list[Decision]:
        """One decision a group. Nothing of a group may be changed.

        `scores[i]` is float32 `[beams, vocab]`, which may be modified: for each beam of group i,
        the log-probabilities of what may follow, after the request's own bias, penalties and
        processors, and where it samples its temperature, top-k, top-p and min-p (-inf: forbidden),
        plus the score of the beam itself. Called in the loop's thread, once a step at most; one
        device-to-host copy is what it should cost.
        """

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[list[int]]:
        del most
        return [[] for _ in sequences]


class Decoding(Backend):
    """Which tokens come next. `bind` is called once per model."""

    kind: ClassVar[str] = "decoding"
    bound: ClassVar[tuple[type, ...]] = (Strategy,)
    capabilities: ClassVar[DecodingCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Drafts go against bits that do not depend on the batch: they are fed as space allows.

        So do beams, which are fed in other pieces once they were evicted.
        """
        del options
        if not requirements.batch_invariant:
            return []
        found = []
        if self.capabilities.rollback:
            found.append("feeds drafts where there is room for them")
        if self.capabilities.forks:
            found.append("feeds beams in other pieces after an eviction")
        return [f"{why}, so bits depend on what else runs (deterministic=True)" for why in found]

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        del options
        own = self.capabilities
        return replace(
            requirements,
            rollback=requirements.rollback or own.rollback,
            forks=requirements.forks or own.forks,
        )

    @abstractmethod
    def bind(self, context: BindContext) -> Strategy:
        """Return the strategy for `context.model`; `context.assistant` is the draft model."""

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), DecodingCapabilities):
            found.append("`capabilities` must be a DecodingCapabilities")
            return found
        own = self.capabilities
        possible = SAMPLER_SETTINGS | (DRAFT_SETTINGS if own.rollback else set())
        if untrue := own.settings - possible - (BEAM_SETTINGS if own.forks else set()):
            found.append(
                f"`capabilities.settings` names {', '.join(sorted(untrue))}, which nothing of its "
                "kind can honour (drafts need rollback=True, beams forks=True)"
            )
        return found
