"""A config made small: the same classes and kinds of layers, few of them, and narrow.

What a model sees (windows, how many keys a sparse attention keeps, blocks of keys) is made smaller
than a prompt of a few tokens, so that it shows in one. Such sizes are found by what they do: they
are whole numbers that change the shape of no weight.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from jackfield.bridge.config_files import config_tree
from jackfield.bridge.encoders import text_class
from jackfield.bridge.layer_configs import of_all, of_some

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 97
_SEEN = 4  # what a window or a sparse attention is made
_LAYERS = 8  # of at most as many different kinds
_SMALL = 400_000  # parameters of a model that need not be narrower
_TOO_LARGE = 30_000_000
_WIDTHS = 64
_PLACES = 256  # more than any prompt of a trial has
_HEADS = 4
_HEAD = 8  # numbers of a head, where there are more heads in deeper layers
_PIXELS = 128  # so that the last of four such layers still has a whole window

#: Fields that say how wide weights are; all else is asked what it does.
_WIDE = re.compile(
    r"hidden|intermediate|head|vocab|layer|expert|rank|embd|embed|token|position|dim|inner|ffn"
    r"|d_model|ctx|id$|groups?$"
)
_WIDTH = re.compile(
    r"^(cross_attention_|out_)?hidden_size$|intermediate|ffn|n_inner|^n_embd$|^d_model$|mlp|lora_rank"
)

#: Lists that may be as long as there are layers, and say nothing of them.
_OF_NO_LAYER = re.compile(r"token_ids?$|^architectures$")


def build(config: PreTrainedConfig, cls: type[PreTrainedModel] | None) -> PreTrainedModel:
    """The model of `config` where torch makes tensors now."""
    make = text_class(config).from_config if cls is None else cls
    model: PreTrainedModel = make(config)
    return model


def shrunk(
    config: PreTrainedConfig, cls: type[PreTrainedModel] | None
) -> Iterator[PreTrainedConfig]:
    """Small configs like `config`, of which `cls` can be built, the best ones first."""
    fewer = copy.deepcopy(config)
    for part in config_tree(fewer):
        _fewer(part)
    narrow = copy.deepcopy(fewer)
    for part in config_tree(narrow):
        _narrow(part)
    for attempt, limit in ((config, _SMALL), (narrow, _TOO_LARGE), (fewer, _TOO_LARGE)):
        plain = _without_names(attempt)
        shapes = _shapes(plain, cls)
        if shapes is not None and sum(shape.numel() for shape in shapes.values()) <= limit:
            yield _seeing_less(plain, cls, shapes)
            yield plain


def _without_names(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with few tokens, none of them special that it does not have."""
    found = copy.deepcopy(config)
    for part in config_tree(found):
        for name in ("vocab_size", "vocab_size_per_layer_input"):
            if isinstance(vocab := getattr(part, name, None), int):
                setattr(part, name, min(vocab, VOCAB))
        for name in ("max_position_embeddings", "max_source_positions"):
            if isinstance(places := getattr(part, name, None), int) and places > _PLACES:
                setattr(part, name, _PLACES)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(getattr(part, name, None), int) and getattr(part, name) >= VOCAB:
                _unset(part, name)
    return found


def _unset(config: PreTrainedConfig, name: str) -> None:
    """Leave a special token out, or, where a config must have one, make it one of few (CWM)."""
    try:
        setattr(config, name, None)
    except StrictDataclassFieldValidationError:
        setattr(config, name, 0)


def _numbers(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    yield from ((name, value) for name, value in vars(config).items() if type(value) is int)


def _fewer(config: PreTrainedConfig) -> None:
    """One layer of each kind, by what the config says of each; two at least."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count <= 2:
        return
    kinds: dict[str, int] = {}
    lists, own, sharing = by_layer(config).values(), of_some(config), _first_sharing(config)
    for index in range(count):
        kind = [values[index] for values in lists], own.get(index), index >= sharing
        kinds.setdefault(repr(kind), index)
    keep = sorted(kinds.values())[:_LAYERS]
    if len(keep) == 1:
        keep = [0, 1]
    try:
        leave(config, keep)
    except NotImplementedError:  # it is the sum of others (ProphetNet)
        return
    if isinstance(layers := getattr(config, "decoder_layers", None), int):
        config.decoder_layers = min(layers, len(keep))  # which num_hidden_layers may not be
    if getattr(config, "first_k_dense_replace", 0) > 1:
        config.first_k_dense_replace = 1


def by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """The fields of a config that say something of each of its layers."""
    count, fields = config.num_hidden_layers, vars(config).items()
    lists = {n: v for n, v in fields if isinstance(v, list) and len(v) == count}
    return {n: v for n, v in lists.items() if not _OF_NO_LAYER.search(n)}


def leave(config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Leave these of its layers in a config, by what it says of each.

    Raises NotImplementedError where its number of layers is the sum of others.
    """
    lists, own, sharing = by_layer(config), of_some(config), _first_sharing(config)
    shared = sum(index >= sharing for index in layers)
    shares = sharing < config.num_hidden_layers
    if own:
        config.per_layer_config = None  # which is numbers of layers that are not there any more
    config.num_hidden_layers = len(layers)
    for name, values in lists.items():
        setattr(config, name, [values[index] for index in layers])
    if own:
        config.per_layer_config = {at: dict(own[i]) for at, i in enumerate(layers) if i in own}
    if shares:
        config.num_kv_shared_layers = shared


def _first_sharing(config: PreTrainedConfig) -> int:
    """The first layer that attends to keys and values of another one, as all after it do."""
    count: int = config.num_hidden_layers
    return count - (getattr(config, "num_kv_shared_layers", None) or 0)


def _narrow(config: PreTrainedConfig) -> None:
    """`_HEADS` heads that share keys and values as they did, in layers of `_WIDTHS` numbers."""
    before = _head_size(config)
    for name, value in _numbers(config):
        if _WIDTH.search(name) and value > _WIDTHS:
            setattr(config, name, _WIDTHS)
    heads, groups = of_all(config, "num_attention_heads"), of_all(config, "num_key_value_heads")
    _fewer_heads(config)
    if own := of_some(config):
        config.per_layer_config = {
            layer: {name: _narrower(name, value, heads, groups) for name, value in fields.items()}
            for layer, fields in own.items()
        }
    _fewer_pixels(config)
    after = _head_size(config)
    rotary = getattr(config, "rope_parameters", None)
    if before and after and isinstance(rotary, dict) and "mrope_section" in rotary:
        # What of a head turns with each axis, together half of it.
        sections = [part * after // before for part in rotary["mrope_section"]]
        config.rope_parameters = {**rotary, "mrope_section": sections}


def _narrower(name: str, value: Any, heads: Any, groups: Any) -> Any:
    """What a layer differs in, where the others have `heads` heads on `groups` keys and values."""
    if type(value) is not int:
        return value
    if _WIDTH.search(name):
        return min(value, _WIDTHS // 2)
    if name == "num_attention_heads" and isinstance(heads, int) and heads > _HEADS:
        return 2 * _HEADS
    if name == "num_key_value_heads" and isinstance(heads, int) and heads > _HEADS:
        return 1 if groups != 1 else 2
    return value


def _fewer_pixels(config: PreTrainedConfig) -> None:
    """Of an encoder of images whose layers grow wider as they go (Swin), which says how wide."""
    depths, heads = getattr(config, "depths", None), getattr(config, "num_heads", None)
    if not (isinstance(depths, list | tuple) and isinstance(heads, list | tuple)):
        return
    config.depths = [min(depth, 2) for depth in depths]  # every other window is shifted
    config.embed_dim = _HEAD * heads[0]
    config.hidden_size = config.embed_dim * 2 ** (len(depths) - 1)
    config.image_size, config.window_size = _PIXELS, _SEEN


def _head_size(config: PreTrainedConfig) -> int:
    """How many numbers a head has; 0 where that is not known."""
    heads, width = (of_all(config, n) for n in ("num_attention_heads", "hidden_size"))
    own = of_all(config, "head_dim")
    if isinstance(own, int):
        return own
    return width // heads if isinstance(heads, int) and isinstance(width, int) and heads else 0


def _fewer_heads(config: PreTrainedConfig) -> None:
    for name in ("encoder_attention_heads", "decoder_attention_heads"):
        if (getattr(config, name, None) or 0) > _HEADS:
            setattr(config, name, _HEADS)
    heads = of_all(config, "num_attention_heads")
    if not isinstance(heads, int) or heads <= _HEADS:
        return
    groups = of_all(config, "num_key_value_heads")
    config.num_attention_heads = _HEADS
    if isinstance(groups, int):
        shared = 1 if groups == 1 else _HEADS if groups == heads else 2
        config.num_key_value_heads = shared


def _shapes(
    config: PreTrainedConfig, cls: type[PreTrainedModel] | None
) -> dict[str, torch.Size] | None:
    """The shape of each parameter; None where no model can be built."""
    try:
        with torch.device("meta"):
            model = build(copy.deepcopy(config), cls)
    except Exception:  # noqa: BLE001 - any model's code
        return None
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _seeing_less(
    config: PreTrainedConfig, cls: type[PreTrainedModel] | None, shapes: dict[str, torch.Size]
) -> PreTrainedConfig:
    """A copy where each whole number above `_SEEN` that shapes no weight is `_SEEN`."""
    config = copy.deepcopy(config)
    for index, part in enumerate(config_tree(config)):
        for name, value in list(_numbers(part)):
            if value <= _SEEN or name.startswith("_") or _WIDE.search(name):
                continue
            changed = copy.deepcopy(config)
            setattr(list(config_tree(changed))[index], name, _SEEN)
            if _shapes(changed, cls) == shapes:
                setattr(part, name, _SEEN)
    return config
