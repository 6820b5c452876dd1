"""A small model that reads features, tried on the CPU: do rows say what the model itself says?

As `encoder_trial`, for features of several lengths, one of them padded and masked as a processor
does it: what is read by itself and padded for the decoder is compared with the model's own forward
call of each prompt alone, mask and all.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from jackfield.bridge.batch_trial import Trial, apart
from jackfield.bridge.encoder_trial import BY_COLUMN, OF_AN_ENCODER
from jackfield.bridge.encoders import beside_an_encoder, cached_config
from jackfield.bridge.feature_encoder import FeatureEncoder
from jackfield.bridge.features import FeatureShape
from jackfield.bridge.forward import forward_of
from jackfield.bridge.joining_trial import NEW, Texts, joining_fault
from jackfield.bridge.shrinking import VOCAB
from jackfield.contracts import ModelInputs

_SHARES = (0.8, 1.0, 0.64)  # of a usual length, which prompts have
_PADDING = 0.3  # of the last one
_FIRST = 2  # tokens that are fed together, as a text may begin with several


def feature_trial(model: PreTrainedModel) -> Trial:
    """What goes wrong with `model`, whose prompts are read one by one."""
    bench = _Bench(model)
    return Trial(
        batch=bench.fault(),
        ragged=joining_fault(bench.texts),
        holes=BY_COLUMN,
        fixed=OF_AN_ENCODER,
    )


class _Bench:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._forward = forward_of(model)
        self._encoder = FeatureEncoder(model)
        self._given = _drawn(self._encoder.shape, model.dtype)
        vocab = min(VOCAB, model.config.get_text_config(decoder=True).vocab_size)
        self._new = torch.randint(4, vocab, (len(self._given), NEW))
        self._states = [self._encoder.read(*given) for given in self._given]
        self._alone = torch.cat([self._own(row) for row in range(len(self._given))])

    @property
    def texts(self) -> Texts:
        joined = self._encoder.joined
        return Texts(
            self._model.config, self._forward, joined, self._states, self._new, self._alone, _FIRST
        )

    def fault(self) -> str | None:
        """What rows together say otherwise than the model itself of each alone; None: nothing."""
        if not bool(self._alone.isfinite().all()):  # Parakeet's encoder of transformers 5.17
            return "of a prompt with padding its own forward call says NaN"
        wrong = apart(self._read(), self._alone)
        return "a row says something else beside one with another prompt" if wrong else None

    def _own(self, row: int) -> torch.Tensor:
        """The logits of each token of a row by the model's own call: `[1, new, vocab]`."""
        values, mask = self._given[row]
        given = {self._encoder.shape.name: values[None]}
        if mask is not None:
            given["attention_mask"] = mask[None]
        ids = self._new[row : row + 1]
        out = self._model(**given, decoder_input_ids=ids, use_cache=False)
        logits: torch.Tensor = out.logits
        return logits

    def _read(self) -> torch.Tensor:
        """The same of all rows, as the engine reads them: `[rows, new, vocab]`."""
        said = self._encoder.joined(self._states, max(map(len, self._states)))
        past = beside_an_encoder(DynamicCache(config=cached_config(self._model.config)))
        parts, begin = [], 0
        for end in range(_FIRST, NEW + 1):
            ids = self._new[:, begin:end]
            positions = torch.arange(begin, end).expand_as(ids)
            kwargs: dict[str, Any] = {
                "input_ids": ids, "position_ids": positions, "attention_mask": None,
                "past_key_values": past, "use_cache": True, "logits_to_keep": end - begin, **said,
            }  # fmt: skip
            parts.append(self._forward(ModelInputs(kwargs, len(ids))))
            begin = end
        return torch.cat(parts, 1)


def _drawn(
    shape: FeatureShape, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Prompts of noise, and their masks."""
    if shape.along is None or shape.padded:
        sizes = shape.sized(shape.some)
        return [(torch.randn(sizes, dtype=dtype), None) for _ in _SHARES]
    lengths = [int(share * shape.some) // shape.multiple * shape.multiple for share in _SHARES]
    drawn: list[tuple[torch.Tensor, torch.Tensor | None]] = [
        (torch.randn(shape.sized(length), dtype=dtype), None) for length in lengths
    ]
    values, length = drawn[-1][0], lengths[-1]
    padding = int(_PADDING * length) // shape.multiple * shape.multiple
    values.narrow(shape.along, length - padding, padding).zero_()
    mask = torch.ones(length, dtype=torch.long)
    mask[length - padding :] = 0
    drawn[-1] = values, mask
    return drawn
