"""``sample``: one token at a time, greedy or sampled, each request by its own settings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from jackfield import hookimpl
from jackfield.contracts import Accepted, BindContext, Decoding, DecodingCapabilities, Strategy

if TYPE_CHECKING:
    import torch

    from jackfield.sequences import Sequence, Step


class Sample(Decoding):
    """Plain decoding: no drafts, one token a step."""

    name = "sample"
    auto_rank = 10
    capabilities = DecodingCapabilities(
        settings=frozenset(
            {
                "bad_words_ids",
                "do_sample",
                "frequency_penalty",
                "logits_processor",
                "logprobs",
                "min_length",
                "min_new_tokens",
                "min_p",
                "presence_penalty",
                "repetition_penalty",
                "seed",
                "sequence_bias",
                "suppress_tokens",
                "temperature",
                "top_k",
                "top_p",
            }
        )
    )

    def bind(self, context: BindContext) -> Strategy:
        return SampleStrategy()


class SampleStrategy(Strategy):
    """Binds the vectorized sampler."""

    def __init__(self) -> None:
        from jackfield.sampling import Sampler

        self._sampler = Sampler()

    def propose(self, sequences: Seq[Sequence]) -> list[list[int]]:
        return [[] for _ in sequences]

    def accept(self, step: Step, logits: torch.Tensor) -> list[Accepted]:
        last = logits[:, -1]
        rows = [i for i, feed in enumerate(step.feeds) if feed.samples]
        if len(rows) == len(step.feeds):
            return self._sampler.sample([feed.sequence for feed in step.feeds], last)
        gains = [Accepted() for _ in step.feeds]
        if rows:
            chosen = self._sampler.sample([step.feeds[i].sequence for i in rows], last[rows])
            for i, gain in zip(rows, chosen, strict=True):
                gains[i] = gain
        return gains


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [Sample()]
