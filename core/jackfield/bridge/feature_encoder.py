"""What reads the features of a prompt, and finds the language that a sound is in."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.crossing import Crossing
from jackfield.bridge.encoders import EncoderOutput, joined
from jackfield.bridge.features import FeatureShape, shape_of
from jackfield.devices import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MASK = "attention_mask"


@dataclass(eq=False)
class GivenFeatures:
    """The features of prompts that are equal, and what the model says of them.

    Attributes:
        digest: Equal for equal features.
        values: On the CPU, in the model's dtype, without a dimension for the batch; None once they
            were read.
        mask: 1 where there is something, 0 behind it (int64); None: all of it is.
        said: What the encoder says, `[positions, size]`; None until it was asked.
        language: The token of the language that it was found to be in; None until it was asked.
    """

    digest: bytes
    values: torch.Tensor | None
    mask: torch.Tensor | None = None
    said: torch.Tensor | None = None
    language: int | None = None


class FeatureEncoder:
    """What reads features, one prompt at a time: none is padded for another."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._encoder: Any = model.get_encoder()
        self._device = input_device(model)
        shape = shape_of(model.config)
        assert shape is not None
        self.shape: FeatureShape = shape
        taken = inspect.signature(self._encoder.forward).parameters
        # As `generate` calls it: by its name, which an encoder of another model may not know.
        self._name = shape.name if shape.name in taken else next(iter(taken))
        self._takes_mask = _MASK in taken
        self._crossing = Crossing(model)

    def read(self, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """What the encoder says of one prompt: `[positions, size]`, without what was padded."""
        batch = {self._name: values[None].to(self._device)}
        if mask is not None and self._takes_mask:
            mask = mask[None].to(self._device)
            batch[_MASK] = mask
        out = self._encoder(**batch)
        said: torch.Tensor = out[0]
        if mask is None or bool(mask.all()):
            return said[0]
        kept = self._kept(out, mask)
        return said[0] if kept is None else said[0, : int(kept[0].sum())]

    def joined(self, states: Sequence[torch.Tensor], columns: int) -> dict[str, Any]:
        """As `encoders.joined`, without a mask where nothing is padded: some decoders take none."""
        found = joined(states, columns)
        if all(len(own) == columns for own in states):
            found["encoder_attention_mask"] = None
        return found

    def _kept(self, out: Any, mask: torch.Tensor) -> torch.Tensor | None:
        """Which positions the model lets its decoder see, `[1, positions]`; None: all of them."""
        own = getattr(out, _MASK, None)
        states = out[0].clone()  # Moonshine's streaming decoder writes into what it is given
        encoded = EncoderOutput(last_hidden_state=states, attention_mask=own)
        start = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with self._crossing.overheard() as masks:
            self._model(
                encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=start,
                use_cache=False,
            )  # fmt: skip
        return masks[0]

    def language(self, said: torch.Tensor, start: int, languages: Collection[int]) -> int:
        """Which of the tokens in `languages` is the likeliest behind `start`.

        As `detect_language` of transformers' Whisper.
        """
        ids = torch.tensor([[start]], device=self._device)
        encoded = EncoderOutput(last_hidden_state=said[None])  # type: ignore[arg-type]
        logits = self._model(
            encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False
        ).logits[0, -1]
        among = sorted(languages)
        return among[int(logits[among].argmax())]
