"""Caches of transformers' kind that are wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from jackfield.contracts import BindContext, CacheCapabilities, TransformersCache

ALL = frozenset({"full_attention", "sliding_attention"})
FULL = frozenset({"full_attention"})
Make = Callable[[BindContext, int | None], Any]


def of(make: Make, **declared: Any) -> Callable[[], TransformersCache]:
    """A backend that makes such caches."""
    given = {"layer_types": ALL, "rollback": FULL, "forks": True, **declared}

    class Wrong(TransformersCache):
        name = "wrong"
        capabilities = CacheCapabilities(layout="padded", **given)

        def make(self, context: BindContext, length: int | None) -> Any:
            return make(context, length)

    return Wrong


def cache_of(cls: type) -> Make:
    return lambda context, length: cls(config=context.config)


def with_layers(change: Callable[[Any], None]) -> Make:
    """transformers' own, with other layers."""

    def make(context: BindContext, length: int | None) -> Any:
        made = transformers.DynamicCache(config=context.config)
        for layer in made.layers:
            change(layer)
        return made

    return make


class Updates(transformers.DynamicCache):
    """Another `update`, which is handed transformers' own."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        return self.change(super().update, keys, values, layer)

    def change(self, own: Any, keys: Any, values: Any, layer: int) -> Any:
        raise NotImplementedError


def updating(change: Callable[..., Any]) -> Make:
    kind = type("Changed", (Updates,), {"change": lambda self, *given: change(*given)})
    return cache_of(kind)


def _in_place(own: Any, keys: Any, values: Any, layer: int) -> Any:
    keys.mul_(1.001)
    return own(keys, values, layer)


def _only_new(own: Any, keys: Any, values: Any, layer: int) -> Any:
    found = own(keys, values, layer)
    return tuple(s[:, :, -keys.shape[2] :] for s in found)


def _late(own: Any, keys: Any, values: Any, layer: int) -> Any:
    """The new token is seen one step late."""
    if keys.shape[2] > 1:
        return own(keys, values, layer)
    found_keys, found_values = own(keys, values, layer)
    return found_keys.roll(1, 2), found_values


def _swapped_rows(own: Any, keys: Any, values: Any, layer: int) -> Any:
    found_keys, found_values = own(keys, values, layer)
    return found_keys.flip(0), found_values


class Misordered(transformers.DynamicCache):
    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx.sort().values)


class FirstRows(transformers.DynamicCache):
    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(torch.arange(len(beam_idx), device=beam_idx.device) % 2)


class HalfReordered(transformers.DynamicCache):
    """Values stay in the order of before."""

    def reorder_cache(self, beam_idx: Any) -> None:
        values = [layer.values for layer in self.layers]
        super().reorder_cache(beam_idx)
        for layer, own in zip(self.layers, values, strict=True):
            if own is not None and len(own) >= len(beam_idx):
                layer.values = own[: len(beam_idx)]


class FirstLayerReordered(transformers.DynamicCache):
    def reorder_cache(self, beam_idx: Any) -> None:
        self.layers[0].reorder_cache(beam_idx)


class NotReordered(transformers.DynamicCache):
    def reorder_cache(self, beam_idx: Any) -> None:
        return


class NotCropped(transformers.DynamicCache):
    def crop(self, tokens_to_remove: int) -> None:
        return


class CropsOneLess(transformers.DynamicCache):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(min(0, tokens_to_remove + 1))


class CropsTheFirst(transformers.DynamicCache):
    """Takes back the first columns and not the last ones."""

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.keys = layer.keys[:, :, -tokens_to_remove:]
            layer.values = layer.values[:, :, -tokens_to_remove:]


class CropsKeys(transformers.DynamicCache):
    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.keys = layer.keys[:, :, :tokens_to_remove]


class CropsToLength(transformers.DynamicCache):
    """Reads the number as the length that stays, as transformers once meant it."""

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.keys = layer.keys[:, :, : abs(tokens_to_remove)]
            layer.values = layer.values[:, :, : abs(tokens_to_remove)]


class Narrow(DynamicSlidingWindowLayer):
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().update(key_states, value_states)
        self.keys = self.keys[:, :, -(self.sliding_window - 2) :]
        self.values = self.values[:, :, -(self.sliding_window - 2) :]
        return found


def _narrow(layer: Any) -> None:
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.__class__ = Narrow


def _window(by: int) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.sliding_window += by

    return change


class Stored(DynamicLayer):
    """Keys and values as `change` leaves them."""

    change: Callable[[Any], Any]

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        return super().update(cls.change(key_states), cls.change(value_states))


def stored(change: Callable[[Any], Any]) -> Make:
    kind = type("Changed", (Stored,), {"change": staticmethod(change)})

    def put(layer: Any) -> None:
        if type(layer) is DynamicLayer:
            layer.__class__ = kind

    return with_layers(put)


class Ring(DynamicLayer):
    """Eight columns, the oldest of which are written over."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().update(key_states, value_states)
        self.keys, self.values = self.keys[:, :, -8:], self.values[:, :, -8:]
        return found


def _ring(layer: Any) -> None:
    if type(layer) is DynamicLayer:
        layer.__class__ = Ring


class Batch(DynamicLayer):
    """Rows are written one after the other into one tensor: a batch is one long row."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states)
        return keys[:1].expand_as(keys), values[:1].expand_as(values)


def _batch(layer: Any) -> None:
    if type(layer) is DynamicLayer:
        layer.__class__ = Batch


class OneLayer(transformers.DynamicCache):
    """Every layer has the keys of the first."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        found = super().update(keys, values, layer)
        if layer and type(self.layers[layer]) is type(self.layers[0]):
            return self.layers[0].keys, self.layers[0].values
        return found


def _one_for_all() -> Make:
    """The same object for every batch."""
    made: list[Any] = []

    def make(context: BindContext, length: int | None) -> Any:
        if not made:
            made.append(transformers.DynamicCache(config=context.config))
        return made[0]

    return make


class Sizes(transformers.DynamicCache):
    """Says that there are fewer columns than it returns."""

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return (length - 1, offset) if length > 8 else (length, offset)


class Offsets(transformers.DynamicCache):
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset + (1 if offset else 0)


class Doubles(transformers.DynamicCache):
    """Appends a column twice where it is the first of a step."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        if keys.shape[2] == 1 and self.layers[layer].get_seq_length() == 9:
            super().update(keys, values, layer)
        return super().update(keys, values, layer)


def fixed(change: Callable[[int], int]) -> Make:
    """transformers' static cache, of another length than was asked for."""
    return lambda context, length: transformers.StaticCache(
        config=context.config, max_cache_len=change(length or 64)
    )


class Moves(transformers.StaticCache):
    """Of fixed shape, in other memory in each step."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        found = super().update(keys, values, layer)
        own = self.layers[layer]
        own.keys, own.values = own.keys.clone(), own.values.clone()
        return found if own.is_sliding else (own.keys, own.values)


class Wraps(transformers.StaticCache):
    """Goes on at its beginning, once sixteen columns are written."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        own = self.layers[layer]
        if not own.is_sliding and own.is_initialized and own.cumulative_length >= 16:
            own.cumulative_length -= 16
        return super().update(keys, values, layer)


def _moves(context: BindContext, length: int | None) -> Any:
    return Moves(config=context.config, max_cache_len=length or 64)


def _wraps(context: BindContext, length: int | None) -> Any:
    return Wraps(config=context.config, max_cache_len=length or 64)


class Tight(TransformersCache):
    """Lets in more than it has columns for."""

    name = "wrong"
    capabilities = CacheCapabilities(layout="padded", layer_types=ALL, static_shapes=True)

    def max_cache_len(self, options: Any) -> int:
        return 64

    def make(self, context: BindContext, length: int | None) -> Any:
        return transformers.StaticCache(config=context.config, max_cache_len=24)


class NoRefusals(TransformersCache):
    """Accepts everything: what it declares is not looked at."""

    name = "wrong"
    capabilities = CacheCapabilities(layout="padded", layer_types=FULL)

    def refuse(self, requirements: Any, options: Any) -> list[str]:
        return []

    def make(self, context: BindContext, length: int | None) -> Any:
        return transformers.DynamicCache(config=context.config)


def refusing(**needs: Any) -> Callable[[], TransformersCache]:
    """Refuses what it declares, where requirements are `needs`."""

    class Refuses(TransformersCache):
        name = "wrong"
        capabilities = CacheCapabilities(
            layout="padded", layer_types=ALL, rollback=FULL, forks=True
        )

        def refuse(self, requirements: Any, options: Any) -> list[str]:
            wrong = all(getattr(requirements, name) == value for name, value in needs.items())
            own: list[str] = super().refuse(requirements, options)
            return [*own, "does not like it"] if wrong else own

        def make(self, context: BindContext, length: int | None) -> Any:
            return transformers.DynamicCache(config=context.config)

    return Refuses


def promising(share: float) -> Callable[[], TransformersCache]:
    """`request_bytes` times `share`."""

    class Promises(TransformersCache):
        name = "wrong"
        capabilities = CacheCapabilities(layout="padded", layer_types=ALL)

        def request_bytes(self, requirements: Any, options: Any, tokens: int) -> int | None:
            found = super().request_bytes(requirements, options, tokens)
            return found and int(share * found)

        def make(self, context: BindContext, length: int | None) -> Any:
            return transformers.DynamicCache(config=context.config)

    return Promises


class Hoards(transformers.DynamicCache):
    """All batches that ever were."""

    ever: ClassVar[list[Any]] = []

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        found = super().update(keys, values, layer)
        self.ever.append(found)
        return found


STATIC = {"rollback": frozenset(), "forks": False, "static_shapes": True}

#: fault -> (the backend, what the verdict says)
ROWS: dict[str, tuple[Callable[[], TransformersCache], str]] = {
    "changes keys in place": (of(updating(_in_place)), r"update changed"),
    "returns what is new": (of(updating(_only_new)), r"update must return|columns"),
    "shows a token late": (of(updating(_late)), r"those of token"),
    "keys of another row": (of(updating(_swapped_rows)), r"request|not what was written"),
    "keys are values": (
        of(updating(lambda own, k, v, layer: own(v, k, layer))), r"are its values",
    ),
    "rows in another order": (of(cache_of(Misordered)), r"request"),
    "the first rows": (of(cache_of(FirstRows)), r"request"),
    "values keep their order": (of(cache_of(HalfReordered)), r"values"),
    "one layer is reordered": (of(cache_of(FirstLayerReordered)), r"layer 1|request|update|raised"),
    "nothing is reordered": (of(cache_of(NotReordered)), r"raised|request|update"),
    "crop does nothing": (of(cache_of(NotCropped)), r"rejected|columns|token"),
    "crops one less": (of(cache_of(CropsOneLess)), r"rejected|columns|token"),
    "crops the first": (of(cache_of(CropsTheFirst)), r"token"),
    "crops keys only": (of(cache_of(CropsKeys)), r"rejected|values|raised|update"),
    "crops to a length": (of(cache_of(CropsToLength)), r"columns|token|update"),
    "keeps one less of a window": (of(with_layers(_narrow)), r"columns|raised|see"),
    "a narrower window": (of(with_layers(_window(-1))), r"see|columns"),
    "stores half": (of(stored(lambda s: s.half().to(s.dtype))), r"not what was written|times"),
    "stores half and returns it": (of(stored(lambda s: s.half())), r"update must return"),
    "stores scaled": (of(stored(lambda s: s * 1.1)), r"1.1 times"),
    "stores negated": (of(stored(lambda s: -s)), r"negated"),
    "stores heads in another order": (of(stored(lambda s: s.flip(1))), r"heads"),
    "stores one head for all": (of(stored(lambda s: s[:, :1].expand_as(s))), r"not what|head"),
    "a ring of eight columns": (of(with_layers(_ring)), r"update must return|columns"),
    "one row for all": (of(with_layers(_batch)), r"request|not what"),
    "one layer for all": (of(cache_of(OneLayer)), r"layer 0|columns|update"),
    "one cache for all batches": (of(_one_for_all()), r"token|columns|request|raised|update"),
    "sizes of masks": (of(cache_of(Sizes)), r"get_mask_sizes"),
    "offsets of masks": (of(cache_of(Offsets)), r"see|token"),
    "a column twice": (of(cache_of(Doubles)), r"get_mask_sizes|token|columns"),
    "a column too few": (of(fixed(lambda n: n - 1), **STATIC), r"raised|update|see"),
    "half the columns": (of(fixed(lambda n: n // 2), **STATIC), r"raised|update|see"),
    "static that moves": (of(_moves, **STATIC), r"moved"),
    "static that wraps": (of(_wraps, **STATIC), r"token|see"),
    "static that is dynamic": (
        of(cache_of(transformers.DynamicCache), **STATIC), r"moved|another shape",
    ),
    "static that is cropped": (
        of(fixed(lambda n: n), rollback=FULL, static_shapes=True, forks=False), r"crop",
    ),
    "too few columns": (Tight, r"raised|update"),
    "windows that are dropped drafts": (
        of(cache_of(transformers.DynamicCache), dtypes=frozenset({"float32"}), layer_types=FULL,
           rollback=FULL, compiles=True, static_shapes=True), r"moved|another shape",
    ),
    "accepts everything": (NoRefusals, r"does not declare"),
    "refuses float16": (refusing(dtype="float16"), r"declares dtypes: float16"),
    "refuses drafts": (refusing(rollback=True), r"declares rollback"),
    "refuses beams": (refusing(forks=True), r"declares forks"),
    "promises half": (promising(0.5), r"request_bytes"),
    "promises a hundred times": (promising(100.0), r"request_bytes"),
    "hoards": (of(cache_of(Hoards)), r"more after|still there"),
    "make raises": (
        of(lambda context, length: {}["no"]), r"raised KeyError",
    ),
    "make returns a list": (of(lambda context, length: []), r"make must return"),
}  # fmt: skip
