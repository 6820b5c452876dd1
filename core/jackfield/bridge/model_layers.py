"""The layers of a model: which attend, how each remembers, which can be given another attention."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from jackfield.bridge.encoders import cached_config, has_encoder
from jackfield.bridge.layer_configs import of_all
from jackfield.bridge.quirks import ADDS_ITS_BIAS_TWICE, READS_THE_NAME


def attention_modules(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module]]:
    """The (layer index, module) of every attention layer of the decoder.

    Older models do not number theirs: there the innermost attention modules count, in their order.
    Of a decoder with an encoder it is the first of a layer, which looks at its own tokens.
    """
    encodes = has_encoder(model.config)
    decoder: Any = model.get_decoder() if encodes else model
    named = [
        module
        for module in decoder.modules()
        if "Attention" in type(module).__name__ and not _is_cross(module)
    ]
    numbered = [m for m in named if isinstance(getattr(m, "layer_idx", None), int)]
    if numbered and encodes:
        first = {int(module.layer_idx): module for module in reversed(numbered)}
        yield from sorted(first.items())
        return
    if numbered:
        yield from ((int(module.layer_idx), module) for module in numbered)
        return
    inner = [m for m in named if not any(other in named for other in list(m.modules())[1:])]
    yield from enumerate(inner)


def _is_cross(module: nn.Module) -> bool:
    """Whether it attends to images or an encoder's text, which is not there."""
    return bool(getattr(module, "is_cross_attention", "CrossAttention" in type(module).__name__))


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """How each layer remembers, as transformers' own dynamic cache lays it out."""
    text = config.get_text_config(decoder=True)
    chunked = of_all(text, "attention_chunk_size") is not None
    cache = DynamicCache(config=cached_config(config))
    names = []
    for layer in cache.layers:
        if "Linear" in type(layer).__name__ or not hasattr(layer, "keys"):
            names.append("linear_attention")
        elif getattr(layer, "is_sliding", False):
            names.append("chunked_attention" if chunked else "sliding_attention")
        else:
            names.append("full_attention")
    return tuple(names)


def windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The window of each cached layer in tokens, None where it sees everything."""
    layers = DynamicCache(config=cached_config(config)).layers
    return tuple(getattr(layer, "sliding_window", None) for layer in layers)


def vocab_size_of(model: PreTrainedModel) -> int:
    """How many token ids it reads and writes: a head may be narrower than an embedding."""
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    return min(size, int(getattr(model.get_output_embeddings(), "out_features", size)))


def replaceable(model: PreTrainedModel) -> bool:
    """Whether the model calls its attention through AttentionInterface, whatever its name is.

    Where a text model has a vision model beside it, only one of them may use the interface (GIT,
    GOT-OCR2): those that attend to its text are looked at.
    """
    kinds = dict(enumerate(layer_types(model.config)))
    attending = (m for i, m in attention_modules(model) if kinds.get(i) != "linear_attention")
    classes: set[Any] = {type(module) for module in attending}
    if not all(map(looks_up, classes)):
        return False
    return not READS_THE_NAME.holds(model)


def own_implementation(model: PreTrainedModel) -> str:
    """What transformers calls the attention in the model's own code, where it is right."""
    return "sdpa" if ADDS_ITS_BIAS_TWICE.holds(model) else "eager"


@functools.cache
def looks_up(cls: Any) -> bool:
    """Whether an attention class, or one that it derives from, uses AttentionInterface."""
    for base in cls.__mro__:
        with contextlib.suppress(OSError, TypeError):  # written at a prompt, or not in Python
            if issubclass(base, nn.Module) and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(base):
                return True
    return False
