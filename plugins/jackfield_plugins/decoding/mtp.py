"""``mtp``: a model's own heads for multi-token prediction guess, the model checks their guesses.

Heads that were trained with a model to say more than its next token (DeepSeek-V3, arXiv:2412.19437;
Gloeckle et al. 2024, arXiv:2404.19737) are its draft model, as with transformers' `use_mtp`. There
they draw by chance of their own; here by the random numbers of the sampler, so that drawn texts
are guessed as well.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

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


class Mtp(Decoding):
    """Needs a model with such heads in its checkpoint, and no second model. Each makes a draft."""

    name = "mtp"
    options = DraftOptions
    capabilities = DecodingCapabilities(settings=SAMPLER_SETTINGS, rollback=True, heads=True)

    def bind(self, context: BindContext) -> Strategy:
        assert context.assistant is not None
        return MtpStrategy(context.options, context.assistant)


class MtpStrategy(Strategy):
    """Takes every draft of the heads."""

    def __init__(self, options: DraftOptions, heads: Assistant) -> None:
        self._heads = heads
        self.min_acceptance_rate = options.min_acceptance_rate
        self.min_speedup = options.min_speedup

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        return self._heads.draft(sequences, max_drafts, [0.0] * len(sequences))

    def release(self, sequences: Seq[Sequence]) -> None:
        self._heads.release(sequences)


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [Mtp()]
