"""One forward call of a model on the meta device, to see how it calls its attention.

What a config and its modules do not say shows in a call: a bias or a mask of the model's own, an
attention called several times a layer, a mask without the window that the cache keeps. The model
has shapes and no numbers, so nothing is computed: every attention returns an empty tensor, and so
do experts, whose routing needs numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributions import Distribution
from transformers import DynamicCache, PreTrainedModel

from jackfield.bridge.encoders import (
    beside_an_encoder,
    cached_config,
    encoder_size,
    for_the_whole,
    has_encoder,
    joined,
)
from jackfield.bridge.features import reads_features, shape_of
from jackfield.bridge.model_layers import attention_modules
from jackfield.bridge.quiet import quiet
from jackfield.bridge.stand_ins import standing_in
from jackfield.contracts.compiling import TRACING
from jackfield.errors import first_line

logger = logging.getLogger("jackfield")

#: Keyword arguments by which a model hands a feature to its attention function.
FEATURE_KWARGS = {
    "sliding_window": "sliding_window",
    "softcap": "softcap",
    "sinks": "s_aux",
    "position_bias": "position_bias",
}

#: Keyword arguments that say nothing which the mask and the tensors do not say already.
PLAIN_KWARGS = frozenset(
    {"cache_position", "dropout", "is_causal", "logits_to_keep", "position_ids", "scaling",
     "use_cache"}
)  # fmt: skip

TOKENS = 3  # more than one: a prompt, for which there is a mask

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Call:
    """One call of the attention: by which layer, and with which keyword arguments.

    `heads` are those of the queries, `kv_shapes` are `(heads, head_dim)` of the keys and values.

    `mask` is the function (batch, head, query, key) -> bool of which its mask was made. None where
    there is no mask, or one (`own_mask`) that the attention's mask function did not return.
    `crosses`: it looks at what an encoder said. `source` is the layer before it that was handed
    the same keys; None: none was.
    """

    layer: int | None
    kwargs: Mapping[str, Any]
    mask: MaskFunction | None
    own_mask: bool = False
    kv_shapes: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    heads: int = 0
    crosses: bool = False
    source: int | None = None

    @property
    def kv_numbers(self) -> int:
        """How many numbers the keys and values of one token are."""
        return sum(heads * size for heads, size in self.kv_shapes)

    def sees(self, query: int, key: int) -> bool:
        """Whether its mask surely lets the token at position `query` see the one at `key`."""
        if self.mask is None:
            return False
        zero, *at = (torch.tensor(i, device="cpu") for i in (0, query, key))
        try:
            return bool(self.mask(zero, zero, *at))
        except (RuntimeError, IndexError):  # it looks things up in tensors of the step
            return False


@dataclass(frozen=True)
class Probe:
    """What one step does: the calls of its attention, and what its cache then holds.

    `cached` says for each layer of transformers' cache how many numbers it keeps of a token; 0
    where that is no keys and values. `states`: how many numbers its state has, in convolutions and
    in what recurs. All are empty where nothing could be seen.
    """

    calls: tuple[Call, ...] = ()
    cached: tuple[int, ...] = ()
    states: tuple[tuple[int, int], ...] = ()


def probe(meta_model: PreTrainedModel) -> Probe:
    """One step of a meta model; nothing is seen where its code needs numbers to run.

    `meta_model` is on the meta device. It is changed, and of no use afterwards.
    """
    calls: list[Call] = []
    cache = DynamicCache(config=cached_config(meta_model.config))
    try:
        with (
            quiet(),
            TRACING,
            torch.no_grad(),
            torch.device("meta"),
            _unvalidated(),
            _listening(meta_model, calls),
        ):
            _step(meta_model.eval(), cache)
    except Exception as error:  # noqa: BLE001 - any model's code; a real step is checked as well
        logger.debug("no probe of %s: %s", type(meta_model).__name__, first_line(error))
        return Probe()
    return Probe(tuple(calls), tuple(map(_numbers, cache.layers)), tuple(map(_state, cache.layers)))


@contextlib.contextmanager
def _unvalidated() -> Iterator[None]:
    """torch's distributions take any numbers meanwhile: looking at them needs some (Gemma 3n)."""
    before: bool = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _step(meta_model: PreTrainedModel, cache: DynamicCache) -> None:
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    # Models ask a mask whether all of it is valid.
    if not has_encoder(meta_model.config):
        taken = inspect.signature(meta_model.forward).parameters
        name = "past_key_values" if "past_key_values" in taken else "cache_params"
        own: dict[str, Any] = {"input_ids": ids, "attention_mask": None, name: cache}
        if "logits_to_keep" in taken:
            own["logits_to_keep"] = 1  # as in every step of ours
        meta_model(**own, use_cache=True)
        return
    said = joined([torch.zeros(TOKENS, encoder_size(meta_model))], TOKENS)
    said |= {"input_ids": ids, "encoder_attention_mask": None}
    whole = for_the_whole(said)
    if reads_features(meta_model.config):
        del whole["attention_mask"]
    meta_model(**whole, past_key_values=beside_an_encoder(cache), use_cache=True)
    if (shape := shape_of(meta_model.config)) is not None:
        try:
            encoder: Any = meta_model.get_encoder()
            encoder(**{shape.name: torch.zeros(1, *shape.sized(shape.some))})
        except Exception as error:  # noqa: BLE001 - as in `probe`; what the decoder does was seen
            logger.debug("no probe of %s: %s", type(encoder).__name__, first_line(error))


def _numbers(layer: Any) -> int:
    """How many numbers a layer keeps of a token."""
    states = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(s.shape[1] * s.shape[3] for s in states if s is not None and s.dim() == 4)


def _state(layer: Any) -> tuple[int, int]:
    """How many numbers a layer keeps of a whole sequence, however long it is."""

    def count(name: str) -> int:
        own = getattr(layer, name, None)
        return sum(t.numel() for t in own.values() if t is not None) if isinstance(own, dict) else 0

    return count("conv_states"), count("recurrent_states")


def _listening(
    meta_model: PreTrainedModel, calls: list[Call]
) -> contextlib.AbstractContextManager[None]:
    """Have `meta_model` call stand-ins that note their arguments in `calls`."""
    masks: list[tuple[torch.Tensor, MaskFunction]] = []
    handed: list[tuple[torch.Tensor, int | None]] = []  # keys, and to which layer first
    own_layers = {id(module) for _, module in attention_modules(meta_model)}
    encodes = has_encoder(meta_model.config)

    def mask(
        batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **kwargs: Any
    ) -> torch.Tensor:
        made = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)
        masks.append((made, mask_function))
        return made

    def attention(
        module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        # A view is what is left of a mask that was cut to the number of keys.
        base = getattr(attention_mask, "_base", None)
        by = next((f for m, f in masks if m is attention_mask or m is base), None)
        own = attention_mask is not None and by is None
        keys, values = ((states.shape[1], states.shape[3]) for states in (key, value))
        batch, heads, length, _ = query.shape
        layer = getattr(module, "layer_idx", None)
        crosses = encodes and id(module) not in own_layers
        source = next((first for states, first in handed if states is key), None)
        if source is None:
            handed.append((key, layer))
        calls.append(Call(layer, kwargs, by, own, (keys, values), heads, crosses, source))
        return query.new_empty(batch, length, heads, value.shape[-1]), None

    def experts(module: Any, hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.empty_like(hidden_states)

    return standing_in(meta_model, attention=attention, experts=experts, mask=mask)


def seen_features(architecture: str, calls: Sequence[Call]) -> dict[str, str]:
    """feature -> evidence, for what a model hands to its attention.

    Not the window: layers name one that the cache knows, or that is longer than any text.
    """
    found = {
        feature: f"{architecture} hands its attention {kwarg!r}"
        for feature, kwarg in FEATURE_KWARGS.items()
        if feature != "sliding_window" and any(c.kwargs.get(kwarg) is not None for c in calls)
    }
    known = PLAIN_KWARGS | set(FEATURE_KWARGS.values())
    if others := sorted({name for call in calls for name in stray(call.kwargs, known)}):
        # Nobody but the model's own code knows what they ask for.
        named = ", ".join(map(repr, others))
        found["own_attention"] = f"{architecture} hands its attention {named}"
    if any(call.own_mask for call in calls):
        found["own_mask"] = f"{architecture} makes its attention's mask itself"
    return found


def stray(kwargs: Mapping[str, Any], known: Set[str]) -> list[str]:
    """The names of what a model hands to its attention that are not `known` and say something."""
    return [k for k, v in kwargs.items() if k not in known and v is not None and v is not False]


def shared_layers(calls: Sequence[Call], cached: int) -> tuple[tuple[int, int], ...]:
    """Each layer behind the `cached` ones, and the one whose keys and values it is handed."""
    shared = {
        call.layer: call.source
        for call in calls
        if call.layer is not None and call.layer >= cached and call.source is not None
    }
    return tuple(sorted(shared.items()))


def irregular(calls: Sequence[Call], windows: Sequence[int | None]) -> str | None:
    """Evidence that an attention module is not one cached layer, called once a step.

    `windows` is what each cached layer keeps, in tokens; None where it keeps everything.
    """
    times = Counter(call.layer for call in calls)
    for call in calls:
        kept = call.layer
        if kept is None or kept >= len(windows):
            kept = call.source
        if kept is None or kept >= len(windows):
            return f"{len(times)} attention layers share the keys and values of {len(windows)}"
        window = windows[kept]
        if window is not None and (call.mask is None or call.sees(window, 0)):
            return f"layer {call.layer} keeps {window} tokens, and its mask has no such window"
    more = max(times.values(), default=1)
    return f"a layer's attention is called {more} times a step" if more > 1 else None
