"""A small encoder-decoder model, tried on the CPU: does a row say in a batch what it says alone?

As `batch_trial`, for what differs: prompts of several lengths were read by themselves, and what the
encoder said of them is padded at the right for the decoder, whose rows are equally long; then some
join others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from jackfield.bridge.batch_trial import Trial, apart
from jackfield.bridge.encoders import TextEncoder, beside_an_encoder, cached_config, joined
from jackfield.bridge.forward import forward_of
from jackfield.bridge.joining_trial import NEW, Texts, joining_fault
from jackfield.bridge.shrinking import VOCAB
from jackfield.contracts import ModelInputs

_LENGTHS = (21, 24, 19)  # of prompts
_COLUMNS = 3  # after the last token of the longest

BY_COLUMN = "its decoder numbers tokens by their column"
OF_AN_ENCODER = "its decoder also looks at what an encoder said"


def encoder_trial(model: PreTrainedModel) -> Trial:
    """What goes wrong with `model`; its texts begin with one token, and are read one by one."""
    bench = _Bench(model)
    differs = bench.differs()
    return Trial(
        batch="a row says something else beside one with another prompt" if differs else None,
        ragged=joining_fault(bench.texts),
        holes=BY_COLUMN,
        fixed=OF_AN_ENCODER,
    )


class _Bench:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._forward = forward_of(model)
        vocab = min(VOCAB, model.config.get_text_config(decoder=True).vocab_size)
        encoder = TextEncoder(model)
        self._said = [encoder.read(torch.randint(4, vocab, (n,)).tolist()) for n in _LENGTHS]
        self._new = torch.randint(4, vocab, (len(_LENGTHS), NEW))
        self._alone = torch.cat(
            [self._read(slice(row, row + 1), 0) for row in range(len(_LENGTHS))]
        )

    @property
    def texts(self) -> Texts:
        return Texts(
            self._model.config, self._forward, joined, self._said, self._new, self._alone, 1
        )

    def differs(self) -> bool:
        """Whether rows together say something else than each alone."""
        return apart(self._read(slice(None), _COLUMNS), self._alone)

    def _read(self, rows: slice, more: int) -> torch.Tensor:
        """The logits of each token of these rows: `[rows, new, vocab]`."""
        states: Seq[torch.Tensor] = self._said[rows]
        said = joined(states, max(map(len, states)) + more)
        past = beside_an_encoder(DynamicCache(config=cached_config(self._model.config)))
        parts, new = [], self._new[rows]
        for at in range(NEW):
            ids = new[:, at : at + 1]
            kwargs: dict[str, Any] = {
                "input_ids": ids, "position_ids": torch.full_like(ids, at), "attention_mask": None,
                "past_key_values": past, "use_cache": True, "logits_to_keep": 1, **said,
            }  # fmt: skip
            parts.append(self._forward(ModelInputs(kwargs, len(ids))))
        return torch.cat(parts, 1)
