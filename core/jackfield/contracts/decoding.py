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
        "bad_words_ids", "begin_suppress_tokens", "do_sample", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
        "frequency_penalty", "guidance_scale", "logits_processor", "logprobs", "min_length",
        "min_new_tokens", "min_p", "negative_prompt", "no_repeat_ngram_size", "output_logits",
        "output_scores", "prefix_allowed_tokens_fn", "presence_penalty", "remove_invalid_values",
        "repetition_penalty", "seed", "sequence_bias", "stopping_criteria", "suppress_tokens",
        "temperature", "top_h", "top_k", "top_p", "typical_p", "watermarking_config",
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

    Attributes:
        settings: The names of the generation settings that it honours, beyond those that the loop
            itself honours (lengths, stops); any other setting in a request is refused by name.
            `SAMPLER_SETTINGS` are those of the sampler.
        rollback: It proposes drafts, tokens that may be taken back; else `propose` is not called.
        assistant: It needs a draft model, which is then `BindContext.assistant`: one of its own,
            or the model's own first layers (`Decoding.early_exit`).
        forks: It is a `Search`, which goes on with copies of a sequence.
        heads: It drafts with the model's own heads for multi-token prediction (`num_mtp_layers`),
            which are then `BindContext.assistant`; a model without them is refused.

    Raises:
        ValueError: `settings` is no set.
    """

    settings: frozenset[str] = field(default_factory=frozenset)
    rollback: bool = False
    assistant: bool = False
    forks: bool = False
    heads: bool = False

    def __post_init__(self) -> None:
        names(self.settings, "setting")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the model itself, before any setting is applied.

    Attributes:
        token_id: The token.
        logprob: Its natural logarithm.
        top: (token id, log-probability) of the likeliest tokens, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens that one sequence gained in a step (none while its prompt is still being fed).

    Attributes:
        tokens: Token ids, in order.
        logprobs: One for each, where the request asked for them.
        error: Ends this request, and only this one.
        ends: Nothing may follow these tokens.
        logits: The model's logits at each token, float32 `[vocab]` on the CPU, where the request
            asked for them.
        scores: The same of the processed scores, by which the token was chosen.
    """

    tokens: Seq[int] = ()
    logprobs: Seq[TokenLogprob] = ()
    error: str | None = None
    ends: bool = False
    logits: Seq[torch.Tensor] = field(default=(), compare=False)
    scores: Seq[torch.Tensor] = field(default=(), compare=False)


class Strategy(ABC):
    """A bound decoding strategy: it guesses, and the loop's sampler decides.

    The loop feeds drafts after a sequence's last token, and the sampler chooses at each position
    as in plain decoding. Drafts are kept as long as they equal its choice, so a wrong guess costs
    time and never changes a text.

    Violations: what it returns is checked in every call. Anything but token ids, more drafts
    than there is room for, and a sequence that was changed are a PluginError, which ends every
    open request. A wrong guess is no violation.

    Attributes:
        min_acceptance_rate: The share of its drafts that must be kept for them to pay, 0 to 1,
            read once when it is bound. A request where they do not is left alone for a while.
        min_speedup: How many times as fast as without drafts decoding must be, at least, by the
            time that steps take, read once when it is bound. Below it the strategy rests for a
            while. 0: nothing is measured.
    """

    min_acceptance_rate: float = 0.0
    min_speedup: float = 0.0

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        """Guess what comes next. Called in the loop's thread, once a step at most.

        Asked only where the backend declares `rollback`.

        Args:
            sequences: Those that decode now, chose this strategy and are not left alone. For
                reading.
            max_drafts: One number each, at least 1: how many drafts there is room for.

        Returns:
            One list of token ids each, in the order of `sequences`, at most `max_drafts[i]` long;
            empty: no guess. They are copied at once.
        """

    def refuse(self, prompt_length: int) -> str | None:
        """Why it can never propose anything for a request; None: it can.

        Asked in the thread that makes a request, while steps may run, where the request names the
        strategy; it then ends with a SettingsError. One that has it by default goes without drafts.

        Args:
            prompt_length: In tokens.
        """
        del prompt_length
        return None

    def release(self, sequences: Seq[Sequence]) -> None:  # noqa: B027 - optional
        """Forget what is kept for these `sequences`, which end; unknown ones are ignored."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text goes on: with what beam number `parent` of its group has, then `token`.

    Attributes:
        parent: A place in `BeamGroup.beams`.
        token: A token id that is not forbidden there and ends no text.
        score: A finite number, to which the next scores of this beam are added.
    """

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What a group does next: it goes on with `beams`; where there are none, it has ended.

    Attributes:
        beams: At most as many as the group has members. They may have parents in common. The first
            are the texts of a search that is cut off. No beam may be longer than
            `max_new_tokens`, and no two are the same, unless the request has several
            `num_beam_groups`.
        hypotheses: All complete texts that are worth keeping, best first, those of the steps before
            too: the best one must stay. A new one is what a beam has and a token for which
            `BeamGroup.ends` says yes.
        error: Ends the request, and only this one.
    """

    beams: Seq[Continuation] = ()
    hypotheses: Seq[Hypothesis] = ()
    error: str | None = None


class Search(Strategy):
    """A bound strategy that goes on with several texts of one request at once: its beams.

    A request begins as one beam that reads the prompt. Each step feeds every beam of a group its
    last token; then `decide` says which continuations the group goes on with. The loop copies
    what is cached for those that have a parent in common, and drops what nobody goes on with.

    Violations: a decision that breaks what `Decision`, `Continuation` and `Hypothesis` say, or
    that ends a request without a text while a token was allowed, is a PluginError, which ends every
    open request. That a better text was passed over is not noticed.
    """

    @abstractmethod
    def width(self, settings: Settings) -> int:
        """How many beams a request has at most, at least 1; its group has as many members.

        Called in the thread that makes the request, while steps may run.

        Args:
            settings: What the request asked for; `settings.beams` has None where it said nothing.

        Raises:
            SettingsError: Its settings do not fit together.
        """

    @abstractmethod
    def decide(self, groups: Seq[BeamGroup], scores: Seq[torch.Tensor]) -> list[Decision]:
        """Decide how groups go on. Called in the loop's thread, once a step at most.

        One copy from device to host is what it should cost.

        Args:
            groups: Those whose beams have all been fed up to their last token. For reading.
            scores: One float32 tensor a group, `[beams, vocab]` on the model's device, which may be
                modified: for each beam its own score, plus the log-probabilities of what may
                follow, after the request's own bias, penalties, processors and structure, and where
                it samples also after its temperature, top-k, top-p and min-p. -inf: forbidden.

        Returns:
            One decision a group, in the order of `groups`.
        """

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        """None: a search has no drafts for `sequences`, whatever `max_drafts` there is room for."""
        del max_drafts
        return [[] for _ in sequences]


class Decoding(Backend):
    """Which tokens come next."""

    kind: ClassVar[str] = "decoding"
    bound: ClassVar[tuple[type, ...]] = (Strategy,)
    capabilities: ClassVar[DecodingCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Drafts make results depend on the batch: they are fed as space allows.

        So do beams, which are fed in other pieces once they were preempted. With `heads`: what
        stands against the model's own.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.
        """
        del options
        heads = requirements.heads_lack if self.capabilities.heads else []
        against = [f"needs heads for multi-token prediction: {why}" for why in heads]
        if not requirements.batch_invariant:
            return against
        found = []
        if self.capabilities.rollback:
            found.append("feeds drafts where there is room for them")
        if self.capabilities.forks:
            found.append("feeds beams in other pieces after a preemption")
        why = "so bits depend on what else runs (deterministic=True)"
        return against + [f"{what}, {why}" for what in found]

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """That the cache can take tokens back (`rollback`), or copy sequences (`forks`).

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.
        """
        del options
        own = self.capabilities
        return replace(
            requirements,
            rollback=requirements.rollback or own.rollback,
            forks=requirements.forks or own.forks,
        )

    def max_drafts(self, options: Any) -> int:
        """For how many drafts of a sequence, beside its next token, a step has room on a GPU.

        Asked when a plan is made, for the memory of steps. A request may ask for more drafts.

        Args:
            options: An instance of `options`.
        """
        del options
        return 10 if self.capabilities.rollback else 0

    def early_exit(self, options: Any) -> int | None:
        """How many of the model's own first layers are the draft model, with its norm and head.

        Asked when a plan is made, where `capabilities.assistant`.

        Args:
            options: An instance of `options`.

        Returns:
            At least 1; None: the draft model is another one, the caller's `assistant_model`.
        """
        del options
        return None

    @abstractmethod
    def bind(self, context: BindContext) -> Strategy:
        """Return the strategy for one engine. Called once a model.

        Args:
            context: `assistant` is the draft model, or the model's heads, where `capabilities` ask
                for one.

        Returns:
            A `Strategy`; a `Search` where `capabilities.forks`.
        """

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), DecodingCapabilities):
            found.append("`capabilities` must be a DecodingCapabilities")
            return found
        own = self.capabilities
        if own.heads and (own.assistant or not own.rollback):
            found.append("one with heads=True has rollback=True and no draft model (assistant)")
        possible = SAMPLER_SETTINGS | (DRAFT_SETTINGS if own.rollback else set())
        if untrue := own.settings - possible - (BEAM_SETTINGS if own.forks else set()):
            found.append(
                f"`capabilities.settings` names {', '.join(sorted(untrue))}, which nothing of its "
                "kind can honour (drafts need rollback=True, beams forks=True)"
            )
        return found
