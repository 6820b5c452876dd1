"""How drafts are drawn: by the settings of their sequence, and the random numbers of its sampler.

Where a draft's distribution is close to the model's, both draw the same token: a maximal-overlap
coupling up to the order of tokens, without either knowing the other's distribution (the
communication-free setting of Daliri, Musco and Suresh 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import MappingProxyType

import torch

from jackfield.contracts import Sequence, Settings, StepBlock
from jackfield.sampling.pipeline import Pipeline
from jackfield.sampling.rows import RowMap

ENDLESS = 1 << 40


def drafting_settings(own: Settings, vocab_size: int) -> Settings:
    """Those of `own` that shape a distribution over `vocab_size` tokens, and have no memory."""
    known = {ids: b for ids, b in own.sequence_bias.items() if max(ids) < vocab_size}
    eos = tuple(token for token in own.eos_token_ids if token < vocab_size)
    return own._replace(
        max_new_tokens=ENDLESS, logits_processor=(), logprobs=None,
        output_logits=False, output_scores=False, guidance_scale=1.0, watermark=None,
        sequence_bias=MappingProxyType(known), eos_token_ids=eos,
    )  # fmt: skip


def drawn(
    copies: Seq[Sequence], drafts: Seq[Seq[int]], logits: torch.Tensor, block: StepBlock
) -> list[tuple[int, float]]:
    """The next draft of each copy behind its `drafts`, and its probability before any setting.

    `logits` are `[copies, vocab]` and may be changed.
    """
    rows = RowMap.drafting(copies, drafts)
    pipeline = Pipeline.of(rows, logits.shape[-1], block)
    probabilities = logits.float().softmax(-1)  # before `choose` may change the logits
    tokens, _, _ = pipeline.choose(logits)
    likely = probabilities.gather(1, tokens[:, None])[:, 0]
    chosen = torch.stack([tokens.to(likely.dtype), likely], 1).tolist()
    return [(int(token), probability) for token, probability in chosen]
