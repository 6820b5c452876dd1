"""What a request's reader gets: deltas while it runs, and a completion at its end."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from jackfield.contracts import TokenLogprob
from jackfield.engine.report import Ran, Report
from jackfield.engine.turns import Copied, Heard
from jackfield.parsing.said import Said, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Usage:
    """Token counts and wall time of one request, in seconds from submission to its last token.

    `cached_tokens` of the prompt were found in the cache, when the request first entered it.
    `first_seconds` are those to its first token; None where there is none.
    """

    prompt_tokens: int
    completion_tokens: int
    seconds: float
    cached_tokens: int = 0
    first_seconds: float | None = None


@dataclass(frozen=True)
class Completion:
    """The outcome of one request. `token_ids` are the new tokens only, a final EOS included.

    `text` leaves out special tokens, and ends before a stop string; None where the model has no
    tokenizer. `error` says why, when `finish_reason` is "error". `score` is what a search ranked it
    by (transformers' `sequences_scores`); None where nothing was searched. `ran` is what `report`
    is made of. `logits` and `scores` are float32 `[new tokens, vocab]` on the CPU, where
    `output_logits` and `output_scores` ask for them: what the model said, and what each token was
    chosen by, -inf where it was out of the question.

    `hidden_states` and `attentions` are what the layers say where `output_hidden_states` and
    `output_attentions` ask for it, of a text that is whole: on the CPU in the model's dtype,
    `[layers + 1, tokens, hidden_size]` and `[layers, heads, tokens, tokens]`. These tokens are the
    prompt's and the new ones without the last, which is never fed.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    ran: Ran = field(repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    score: float | None = None
    logits: torch.Tensor | None = field(default=None, repr=False, compare=False)
    scores: torch.Tensor | None = field(default=None, repr=False, compare=False)
    hidden_states: torch.Tensor | None = field(default=None, repr=False, compare=False)
    attentions: torch.Tensor | None = field(default=None, repr=False, compare=False)
    heard: Heard | Copied | None = field(default=None, repr=False, compare=False)

    @property
    def content(self) -> str | None:
        """The text without thoughts and calls: what an answer in a chat says to its reader."""
        return self.text if self.text is None else self._said.content

    @property
    def reasoning(self) -> str | None:
        """What the model thought, where its chat template has thoughts; None: nothing."""
        return self._said.reasoning or None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of functions in `tools`, in their order.

        Raises UsageError where there are `tools`, and the chat template's form is not known.
        """
        return self._said.tool_calls

    @cached_property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with; calls that are not whole are left out.

        Thoughts are in it where the chat template reads them.
        """
        if self.heard is None:
            return {"role": "assistant", "content": self.text}
        return self.heard.message(self._said)

    @cached_property
    def _said(self) -> Said[ToolCall]:
        if self.heard is None or self.text is None:
            return Said(self.text or "")
        return self.heard.whole(self.token_ids, self.text)

    def __getstate__(self) -> dict[str, Any]:
        """Whoever copies it reads it: how that is done is the engine's."""
        if self.heard is None:
            return vars(self)
        return {**vars(self), "heard": Copied(self._said, self.message)}

    @cached_property
    def report(self) -> Report:
        """What was observed to run since the request came; made when it is asked for."""
        return self.ran.report()

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "seconds": round(self.usage.seconds, 6),
                "cached_tokens": self.usage.cached_tokens,
            },
            "report": self.report.to_dict(),
        }
        if self.logprobs:
            data["logprobs"] = [
                {"token_id": p.token_id, "logprob": p.logprob, "top": [list(t) for t in p.top]}
                for p in self.logprobs
            ]
        for name in ("logits", "scores", "hidden_states", "attentions"):
            if (array := getattr(self, name)) is not None:
                data[name] = _finite(array.tolist())
        if self.heard is not None:
            data |= {"content": self.content, "reasoning": self.reasoning}
            if self._said.unread is None:
                data["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.error is not None:
            data["error"] = self.error
        if self.score is not None:
            data["score"] = self.score
        return data


def _finite(value: Any) -> Any:
    """Numbers, or lists of them, as JSON has them: null where one is not finite."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if isfinite(value) else None


@dataclass(frozen=True)
class Delta:
    """What a step added to a streamed request; the last one carries the completion.

    A reader who is many steps behind gets what they added as one.
    `text` is empty while characters or a possible stop string are incomplete. `logprobs` are those
    of `token_ids`, where they were asked for. Of an answer in a chat `end` is how many tokens there
    are now.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    heard: Heard | None = field(default=None, repr=False, compare=False)
    end: int = field(default=0, repr=False, compare=False)

    @property
    def content(self) -> str:
        """What the step added to the completion's `content`."""
        return self._said.content

    @property
    def reasoning(self) -> str:
        """What the step added to the completion's `reasoning`."""
        return self._said.reasoning

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """What the step added to calls, one for each that it added to. Raises as there."""
        return self._said.tool_calls

    @cached_property
    def _said(self) -> Said[ToolCallDelta]:
        if self.heard is None:
            return Said(self.text)
        start = self.end - len(self.token_ids)
        return self.heard.piece(start, self.end, last=self.completion is not None)

    def __getstate__(self) -> dict[str, Any]:
        """As of a completion."""
        if self.heard is None:
            return vars(self)
        return {**vars(self), "_said": self._said, "heard": None}

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completion.finish_reason if self.completion else None

    @classmethod
    def merged(cls, deltas: Seq[Delta]) -> Delta:
        """What several steps added, in their order; none but the last has a completion."""
        return cls(
            "".join(delta.text for delta in deltas),
            [token for delta in deltas for token in delta.token_ids],
            deltas[-1].completion,
            [one for delta in deltas for one in delta.logprobs],
            deltas[-1].heard,
            deltas[-1].end,
        )
