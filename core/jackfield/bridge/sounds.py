"""Sounds as prompts: a model's own feature extractor makes features of samples."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoFeatureExtractor, ProcessorMixin

from jackfield.bridge.features import FeatureShape, shape_of
from jackfield.bridge.processor_files import read_from_files
from jackfield.errors import PromptError, UsageError, quoted
from jackfield.requests.prompts import as_prompt_error

if TYPE_CHECKING:
    from jackfield.bridge.source import ModelSource
    from jackfield.requests.features import FeaturesPrompt

_MASK = "attention_mask"


class SoundReader:
    """The feature extractor of a model that reads features of sounds, of the shape `shape`."""

    def __init__(self, extractor: Any, shape: FeatureShape) -> None:
        self._extractor, self._shape = extractor, shape
        self._rate = int(extractor.sampling_rate)
        # Of a window that is always filled up the extractor would cut what is longer.
        self._most = getattr(extractor, "n_samples", None) if shape.padded else None
        self._lock = threading.Lock()

    @as_prompt_error
    def read(self, prompt: FeaturesPrompt) -> FeaturesPrompt:
        """The features of a prompt that is a sound. Raises PromptError."""
        samples = self._samples(prompt)
        with self._lock:
            found = self._extractor(samples.numpy(), sampling_rate=self._rate, return_tensors="pt")
        values = found[self._shape.name]
        if len(values) != 1:
            raise PromptError(
                f"{type(self._extractor).__name__} cuts the sound into {len(values)} pieces; cut "
                "it yourself, and give each as a prompt"
            )
        mask = found.get(_MASK)
        values, mask = self._filled(values[0], None if mask is None else mask[0])
        return replace(prompt, name=self._shape.name, values=values, attention_mask=mask)

    def _samples(self, prompt: FeaturesPrompt) -> torch.Tensor:
        samples = torch.as_tensor(prompt.values, device="cpu").detach()
        if not samples.is_floating_point() or samples.dim() != 1 or not len(samples):
            raise PromptError(
                f"audio has the shape {list(samples.shape)} and the dtype "
                f"{str(samples.dtype).removeprefix('torch.')}; give the floating-point samples of "
                "one channel, from -1 to 1"
            )
        if prompt.attention_mask is not None:
            raise PromptError("audio has no attention_mask; the feature extractor makes one")
        rate = prompt.sampling_rate
        if isinstance(rate, bool) or rate != self._rate:
            raise PromptError(
                f"audio has sampling_rate={quoted(rate)}, and the model hears {self._rate} samples "
                f"a second; resample it, and say 'sampling_rate': {self._rate}"
            )
        if self._most is not None and len(samples) > self._most:
            raise PromptError(
                f"audio is {len(samples) / self._rate:.1f} s long, and one prompt is "
                f"{self._most / self._rate:g} s at most; cut it, and give each piece as a prompt"
            )
        if not bool(samples.isfinite().all()):
            raise PromptError("audio has a NaN or an infinite number; look at what it is made of")
        return samples.float()

    def _filled(
        self, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """With zeros up to a whole number of frames, where the model reads only such."""
        along = self._shape.along or 0
        gap = -values.shape[along] % self._shape.multiple
        if not gap:
            return values, mask
        sizes = [gap if at == along else size for at, size in enumerate(values.shape)]
        if mask is None:
            mask = torch.ones(values.shape[along], dtype=torch.long)
        return torch.cat([values, values.new_zeros(sizes)], along), torch.cat(
            [mask, mask.new_zeros(gap)]
        )


def sound_reader(given: Any, source: ModelSource) -> SoundReader | str | None:
    """What makes features of sounds, or why nothing does; None: the model hears none.

    It is a part of the processor that was `given` as the tokenizer, or of the same files.
    """
    shape = shape_of(source.config)
    if shape is None or shape.name == "pixel_values":
        return None
    if isinstance(given, ProcessorMixin):
        extractor = getattr(given, "feature_extractor", None)
    else:
        try:
            extractor = read_from_files(AutoFeatureExtractor, "feature extractor", given, source)
        except UsageError as error:
            return str(error)
    if not isinstance(getattr(extractor, "sampling_rate", None), int):
        return f"{type(extractor).__name__} says no sampling_rate"
    return SoundReader(extractor, shape)
