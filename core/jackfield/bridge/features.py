"""Encoders of sounds and images: by which name, and in which shape, they are given features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Numbers of one prompt, where a model has no bound of its own: 4 minutes of sound at 16 kHz.
MOST_NUMBERS = 2**22


@dataclass(frozen=True)
class FeatureShape:
    """What one prompt of a model is.

    Attributes:
        name: The argument of the model's, as its processor calls it too.
        axes: What each dimension is: a number of something, or the length of the prompt.
        sizes: Of each dimension; None for the one that is as long as the prompt.
        most: How long that may be.
        multiple: It is a multiple of this.
        padded: It is made `most` long, with zeros, as the model's own `generate` does.
    """

    name: str
    axes: tuple[str, ...]
    sizes: tuple[int | None, ...]
    most: int = 0
    multiple: int = 1
    padded: bool = False

    @property
    def along(self) -> int | None:
        """Which dimension is as long as the prompt; None: all have one size."""
        return self.sizes.index(None) if None in self.sizes else None

    @property
    def some(self) -> int:
        """A length that prompts have: a second of sound or so."""
        if self.along is None or self.padded:
            return self.most
        return min(self.most, 12_000 if self.axes[self.along] == "samples" else 128)

    def sized(self, length: int) -> list[int]:
        """The size of each dimension of a prompt that is so long."""
        return [length if size is None else size for size in self.sizes]

    def told(self) -> str:
        """The shape in words, for a message."""
        most = f"up to {self.most}" if self.multiple == 1 else f"{self.multiple} to {self.most}"
        sizes = (most if size is None else str(size) for size in self.sizes)
        return " x ".join(f"{size} {axis}" for size, axis in zip(sizes, self.axes, strict=True))


def shape_of(config: PreTrainedConfig) -> FeatureShape | None:
    """What prompts of models of `config` are; None: no features, or nobody here knows."""
    find = _SHAPES.get(config.model_type)
    return None if find is None else find(config)


def reads_features(config: PreTrainedConfig) -> bool:
    """Whether models of `config` read features with an encoder."""
    return bool(getattr(config, "is_encoder_decoder", False)) and shape_of(config) is not None


def _samples(multiple: int = 1) -> FeatureShape:
    most = MOST_NUMBERS // multiple * multiple
    return FeatureShape("input_values", ("samples",), (None,), most, multiple)


def _frames(bins: int, most: int = MOST_NUMBERS) -> FeatureShape:
    most = min(most, MOST_NUMBERS // bins)
    return FeatureShape("input_features", ("frames", "mel bins"), (None, bins), most)


def _whisper(config: Any) -> FeatureShape:
    most = 2 * config.max_source_positions  # its second convolution takes every other frame
    axes, sizes = ("mel bins", "frames"), (config.num_mel_bins, None)
    return FeatureShape("input_features", axes, sizes, most, padded=True)


def _speech_to_text(config: Any) -> FeatureShape:
    return _frames(config.input_feat_per_channel, config.max_source_positions)


def _parakeet(config: Any) -> FeatureShape:
    encoder = config.encoder_config
    most = encoder.max_position_embeddings * encoder.subsampling_factor
    return _frames(encoder.num_mel_bins, most)


def _moonshine_streaming(config: Any) -> FeatureShape:
    encoder = config.encoder_config
    return _samples(round(encoder.sample_rate * encoder.frame_ms / 1000))


def _speech_encoder(config: Any) -> FeatureShape | None:
    encoder = config.encoder
    if (bins := getattr(encoder, "feature_projection_input_dim", None)) is not None:
        return _frames(bins)  # Wav2Vec2-BERT
    return _samples() if hasattr(encoder, "feat_extract_norm") else None


def _image_encoder(config: Any) -> FeatureShape | None:
    encoder = config.encoder
    size, channels = getattr(encoder, "image_size", None), getattr(encoder, "num_channels", None)
    if size is None or channels is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    axes = ("channels", "rows", "columns")
    return FeatureShape("pixel_values", axes, (channels, height, width))


_SHAPES: Mapping[str, Callable[[Any], FeatureShape | None]] = {
    "canary": _parakeet,
    "cohere_asr": _parakeet,
    "moonshine": lambda _: _samples(),
    "moonshine_streaming": _moonshine_streaming,
    "speech-encoder-decoder": _speech_encoder,
    "speech_to_text": _speech_to_text,
    "speecht5": lambda _: _samples(),
    "vision-encoder-decoder": _image_encoder,
    "whisper": _whisper,
}
