"""Encoder-decoder models: an encoder reads the prompt once, the decoder looks at what it said."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

from jackfield.bridge.features import reads_features
from jackfield.devices import input_device
from jackfield.errors import CheckpointError, PlanError, shown


@dataclass
class EncoderOutput(BaseModelOutput):
    """What an encoder said; nothing of how its experts were chosen, which is for training."""

    attention_mask: Any = None
    router_logits: Any = None
    router_probs: Any = None


#: What a step of a decoder is called by, and what the whole model calls it.
_NAMES = {
    "input_ids": "decoder_input_ids",
    "position_ids": "decoder_position_ids",
    "attention_mask": "decoder_attention_mask",
    "encoder_attention_mask": "attention_mask",
}
#: Arguments without which a model is not driven.
NEEDED = frozenset({"encoder_outputs", *_NAMES.values()} - {"decoder_position_ids"})


def has_encoder(config: PreTrainedConfig) -> bool:
    """Whether models of `config` read their prompt with an encoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def part_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model and of the models in it, each once; T5's stacks have copies."""
    parts = (part.config for part in model.modules() if isinstance(part, PreTrainedModel))
    return list({id(config): config for config in (model.config, *parts)}.values())


def cached_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config` as transformers' caches are to read it: some count the encoder's layers (T5)."""
    layers = getattr(config, "num_decoder_layers", None) if has_encoder(config) else None
    if layers is None or layers == config.num_hidden_layers:
        return config
    found = copy.deepcopy(config)
    found.num_hidden_layers = layers
    return found


def text_class(config: PreTrainedConfig) -> Any:
    """transformers' class of classes that generate text. Raises CheckpointError where none does."""
    if not has_encoder(config):
        return AutoModelForImageTextToText if _reads_images_too(config) else AutoModelForCausalLM
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return AutoModelForSeq2SeqLM
    if reads_features(config):
        heard = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        return AutoModelForSpeechSeq2Seq if heard else AutoModelForImageTextToText
    raise CheckpointError(
        f"a model of type {config.model_type!r} has an encoder that reads no text, and no features "
        "that are known here; give a decoder, or an encoder-decoder model for text or speech"
    )


def _reads_images_too(config: PreTrainedConfig) -> bool:
    """Whether its models have no class for text alone, and one that generates as others do."""
    kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in kinds:
        return False
    found: Any = kinds[type(config)]
    usual = getattr(found, "generate", None) is GenerationMixin.generate
    return usual and hasattr(found, "get_image_features")


def for_the_whole(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a decoder's step, by the names that the whole model has for them."""
    return {_NAMES.get(name, name): value for name, value in kwargs.items()}


def beside_an_encoder(cache: Cache) -> EncoderDecoderCache:
    """`cache` for a decoder's own keys and values, with room for those of the encoder's text."""
    return EncoderDecoderCache(cache, DynamicCache())


def layers_of(cache: Cache | None) -> list[Any]:
    """All layers of a cache, those of an encoder's text too."""
    if isinstance(cache, EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return [] if cache is None else list(cache.layers)


def decoder_start(model: PreTrainedModel, vocab_size: int) -> int:
    """The token that every text of its decoder begins with. Raises PlanError where none is told."""
    text = model.config.get_text_config(decoder=True)
    places = (
        (model.generation_config, "decoder_start_token_id"),
        (model.config, "decoder_start_token_id"),
        (model.generation_config, "bos_token_id"),
        (model.config, "bos_token_id"),
        (text, "bos_token_id"),
    )
    for config, name in places:
        token = getattr(config, name, None)
        if type(token) is int and 0 <= token < vocab_size:
            return token
        if token is not None and "decoder" in name:
            raise PlanError(
                f"{type(model).__name__} begins its texts with {name} = {shown(token)}, which is "
                "no token id; set one token"
            )
    raise PlanError(
        f"{type(model).__name__} does not say which token its texts begin with; set "
        "decoder_start_token_id in its generation_config.json, or in the live model's "
        "generation_config"
    )


class TextEncoder:
    """What reads prompts, one at a time: no prompt is padded for another."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._encoder: Any = model.get_encoder()
        self._device = input_device(model)

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """What it says of each token: `[tokens, size]`."""
        tokens = torch.tensor([list(ids)], device=self._device)
        with _as_before(self._encoder):
            said = self._encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        states: torch.Tensor = said[0]
        return states[0]

    def joined(self, states: Sequence[torch.Tensor], columns: int) -> dict[str, Any]:
        """Rows of what it said, padded at the right: arguments of a step of the decoder."""
        return joined(states, columns)


@contextlib.contextmanager
def _as_before(encoder: Any) -> Iterator[None]:
    """Whatever is read meanwhile, `encoder` reads the next prompt as if it were the first.

    BigBird's attends without blocks from its first short prompt on, with modules that it makes for
    that, which draw random weights before they take its own.
    """
    parts = [part for part in encoder.modules() if hasattr(part, "set_attention_type")]
    if not parts:
        yield
        return
    before = [(part, part.attention_type, dict(part._modules)) for part in parts]
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        for part, kind, modules in before:
            part.attention_type = kind
            part._modules.update(modules)


def joined(states: Sequence[torch.Tensor], columns: int) -> dict[str, Any]:
    """Rows of what an encoder said, padded at the right: arguments of a step of the decoder."""
    first = states[0]
    rows = first.new_zeros(len(states), columns, first.shape[1])
    mask = torch.zeros(len(states), columns, dtype=torch.long, device=first.device)
    for row, own in enumerate(states):
        rows[row, : len(own)] = own
        mask[row, : len(own)] = 1
    return {
        "encoder_outputs": EncoderOutput(last_hidden_state=rows),  # type: ignore[arg-type]
        "encoder_attention_mask": mask,
    }


def encoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """What says how its encoder is made; FSMT's has no config of its own."""
    config: PreTrainedConfig = getattr(model.get_encoder(), "config", model.config)
    return config


def encoder_size(model: PreTrainedModel) -> int:
    """How many numbers its encoder says of a token."""
    return int(encoder_config(model).hidden_size)
