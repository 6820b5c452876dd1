"""``assisted``: a small model guesses, the model checks several guesses at once.

The small model may be the model's own first layers (early exit, self-speculation: LayerSkip,
Elhoushi et al. 2024, arXiv:2404.16710).

Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).
There a draft is accepted by chance so that the target's distribution comes out; here the sampler's
own choice decides, which the draft model guessed with the same random numbers, so that the very
text comes out.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import (
    SAMPLER_SETTINGS,
    Assistant,
    BindContext,
    Decoding,
    DecodingCapabilities,
    Strategy,
)
from jackfield_plugins.decoding.paying import DraftOptions

if TYPE_CHECKING:
    from jackfield.contracts import Sequence

LONGEST = 32  # drafts, however well they do


@dataclass(frozen=True)
class AssistedOptions(DraftOptions):
    """How many drafts, under transformers' names; requests override them by the same.

    With the schedule "heuristic" a request's drafts become two more when all were right and one
    less when not; "constant" keeps their number. A draft to which the draft model gives less than
    `assistant_confidence_threshold` is the last one. With `assistant_early_exit` the draft model is
    the model's own first so many layers.
    """

    assistant_early_exit: int | None = None
    num_assistant_tokens: int = 4
    num_assistant_tokens_schedule: Literal["constant", "heuristic"] = "constant"
    assistant_confidence_threshold: float = 0.4

    def __post_init__(self) -> None:
        for name in ("assistant_early_exit", "num_assistant_tokens"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        if not 0 <= (threshold := self.assistant_confidence_threshold) <= 1:
            raise ValueError(f"assistant_confidence_threshold must be from 0 to 1, not {threshold}")
        super().__post_init__()


class Assisted(Decoding):
    """Needs `assistant_model`, of the same vocabulary or with a tokenizer of its own; or exits
    early, by `assistant_early_exit`.
    """

    name = "assisted"
    options = AssistedOptions
    capabilities = DecodingCapabilities(
        settings=SAMPLER_SETTINGS
        | {
            "assistant_confidence_threshold",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
        },
        rollback=True,
        assistant=True,
    )

    def max_drafts(self, options: Any) -> int:
        if options.num_assistant_tokens_schedule == "constant":
            return int(options.num_assistant_tokens)
        return max(LONGEST, int(options.num_assistant_tokens))

    def early_exit(self, options: Any) -> int | None:
        return options.assistant_early_exit  # type: ignore[no-any-return]

    def bind(self, context: BindContext) -> Strategy:
        assert context.assistant is not None
        return AssistedStrategy(context.options, context.assistant)


class AssistedStrategy(Strategy):
    """Says how far the draft model goes on with each sequence."""

    def __init__(self, options: AssistedOptions, assistant: Assistant) -> None:
        self._options = options
        self._assistant = assistant
        self.min_acceptance_rate = options.min_acceptance_rate
        self.min_speedup = options.min_speedup
        self._lengths: dict[int, int] = {}
        self._last: dict[int, tuple[int, list[int]]] = {}  # where drafts began, and which

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        lengths = [
            min(self._length(s), room) for s, room in zip(sequences, max_drafts, strict=True)
        ]
        found = self._assistant.draft(
            sequences, lengths, [self._confidence_threshold(s) for s in sequences]
        )
        for sequence, drafts in zip(sequences, found, strict=True):
            self._last[sequence.id] = (len(sequence.tokens), drafts)
        return found

    def _confidence_threshold(self, sequence: Sequence) -> float:
        asked = sequence.settings.drafts.assistant_confidence_threshold
        return self._options.assistant_confidence_threshold if asked is None else asked

    def _length(self, sequence: Sequence) -> int:
        """How many drafts the request gets now, by how it did with those before."""
        asked = sequence.settings.drafts
        start = asked.num_assistant_tokens or self._options.num_assistant_tokens
        schedule = asked.num_assistant_tokens_schedule
        if (schedule or self._options.num_assistant_tokens_schedule) == "constant":
            return start
        length = self._lengths.get(sequence.id, start)
        begin, drafts = self._last.get(sequence.id, (0, []))
        if drafts:
            right = sequence.tokens[begin : begin + len(drafts)] == drafts
            if not right:
                length = max(1, length - 1)
            elif len(drafts) >= length:  # one that stopped for want of confidence proves nothing
                length = min(LONGEST, length + 2)
        self._lengths[sequence.id] = length
        return length

    def refuse(self, prompt_length: int) -> str | None:
        limit = self._assistant.context_length
        if limit is None or prompt_length < limit:
            return None
        return (
            f"the prompt has {prompt_length} tokens, the draft model's context is {limit}, so it "
            "can guess nothing; choose another decoding, or a draft model with a longer context"
        )

    def release(self, sequences: Seq[Sequence]) -> None:
        self._assistant.release(sequences)
        for sequence in sequences:
            self._lengths.pop(sequence.id, None)
            self._last.pop(sequence.id, None)


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [Assisted()]
