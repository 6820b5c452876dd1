"""Plug an attention backend into transformers: attention and mask as one act, calls counted.

transformers reads meaning into names ("flash", "sdpa", "flex_attention" as substrings), gives a
name without a registered mask function no mask at all, and overwrites silently. So every binding
gets a key of its own that means nothing to anybody, registered in both tables together.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from jackfield.bridge.encoders import has_encoder, part_configs
from jackfield.bridge.model_attention import model_attention, narrow_eager_mask
from jackfield.bridge.model_layers import attention_modules, looks_up, own_implementation
from jackfield.bridge.native_attention import NativeAttention
from jackfield.bridge.probe import FEATURE_KWARGS, PLAIN_KWARGS, stray
from jackfield.bridge.tally import Tally
from jackfield.contracts import (
    BindContext,
    Blocks,
    BoundAttention,
    ModelAttention,
    PackedKVCache,
    PackedLayer,
    PageTables,
)
from jackfield.errors import ExecutionError, PlanError, PluginError, quoted
from jackfield.guarded import fault, guarded
from jackfield.registry.backends import Registered

LINEAR = "linear_attention"
_CALLS = 8  # of a layer in one step, that are remembered
KEY = "jackfield-"  # what our keys in transformers' tables begin with; means nothing to it
_serial = itertools.count(1)


class Tap(Protocol):
    """Who looks on at the calls of a step."""

    def begin(self) -> None:
        """A step begins; calls of one that failed before it are not of it."""

    def note(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        pages: PackedLayer | None,
    ) -> None:
        """A layer called. All of it is to be read now: it may be over when this returns."""


#: What is to be called in place of a function, called "write" or "attention".
Stand = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class AttentionBinding:
    """One binding of one attention backend: its key in transformers, and what was observed.

    `like` is the model that is bound, or a meta model of it while it is loading. `replace` has what
    it is handed stand for the calls of cache and backend, and returns what undoes that; None: the
    model's own code attends.
    """

    def __init__(
        self,
        registered: Registered,
        context: BindContext,
        like: PreTrainedModel,
        pages: PackedKVCache | None = None,
    ) -> None:
        self.registered = registered
        self.tally = Tally()
        self.source: str | None = None
        self.forward: Callable[..., Any] | None = None  # None: it is part of the model's code
        self.implementation: str | None = None  # what transformers calls that code, if it runs
        self.native: NativeAttention | None = None
        self.tap: Tap | None = None
        self.replace: Callable[[Stand], Callable[[], None]] | None = None
        self.blocks: Mapping[int | None, Blocks] | None = None  # of the step, by window of layers
        self._marked: list[PageTables] = []  # with blocks, which the next step has not
        self._recording: list[int] | None = None  # layers called, while a step is recorded
        self._hooks: list[Any] = []
        self._aside = False  # the model's calls are somebody else's
        self._close: Callable[[], None] | None = None
        kinds = dict(enumerate(context.requirements.layer_types))
        #: the layers that must have called by the end of a step
        self.expected = {i for i, _ in attention_modules(like) if kinds.get(i) != LINEAR}
        self._once = not context.requirements.irregular
        self._sources = dict(context.requirements.shared_layers)
        self._planned = sorted(self.expected)
        self._called: deque[int] = deque(maxlen=_CALLS * len(self.expected) + _CALLS)
        self._configs: list[PreTrainedConfig] = []  # those that name it while it is installed
        bound = registered.bind(context)
        if isinstance(bound, ModelAttention):
            own = model_attention(like)
            if own is None:
                if pages is not None:
                    raise PlanError(
                        f"{registered} cannot be had as a function for {type(like).__name__}, so "
                        "it cannot read pages; choose a padded cache, e.g. 'dynamic'"
                    )
                self._leave_to(like, bound.implementation)
                return
            bound, stranger = own, False
        else:
            stranger = True
        self.source, self._close = bound.source, bound.close
        self._warm(bound, pages)
        forward = self._padded(bound) if pages is None else self._packed(bound, pages)
        if stranger:
            forward = self._declared(forward)
        self.key = f"{KEY}{next(_serial)}"
        self.native = self._native(bound, pages)
        # Modules with an encoder do not always say themselves that they are causal.
        masked = {"own_mask", "cross_attention"}
        self._whole_mask = bool(masked & context.requirements.features.keys())
        self.forward, mask = forward, self._masking(bound.mask)
        if context.requirements.compiled:
            from jackfield.bridge.opaque import opaque, unmasked

            forward, mask = opaque(forward), unmasked(mask)
        AttentionInterface.register(self.key, forward)
        # A packed attention reads what it may see off the layer. transformers makes no mask for a
        # name without a mask function, and does not look for packed sequences in the positions.
        if pages is None:
            AttentionMaskInterface.register(self.key, mask)

    def _warm(self, bound: BoundAttention, pages: PackedKVCache | None) -> None:
        if bound.warm is not None and pages is not None and pages.page_size is not None:
            try:
                with guarded(self.registered, "warm"):
                    bound.warm(pages.page_size)
            except BaseException:
                self._close_backend()
                raise

    def _leave_to(self, model: PreTrainedModel, implementation: str) -> None:
        """Have `model` run the attention in its code, which it does not look up; hooks count.

        It still looks up its mask, so a key of ours brings one that is right in float64 too, unless
        the model reads the very name.
        """
        if implementation == "eager":
            implementation = own_implementation(model)
        self.implementation = implementation
        classes: set[Any] = {type(module) for _, module in attention_modules(model)}
        reads = any(map(looks_up, classes)) or type(model)._can_set_attn_implementation()
        if reads or implementation != "eager":
            self.key = implementation
            return
        self.key = f"{KEY}{next(_serial)}"
        AttentionMaskInterface.register(self.key, narrow_eager_mask)

    def _padded(self, bound: BoundAttention) -> Callable[..., Any]:
        """Count the call, and hold what comes out of it to the contract."""
        count, note, inner = self.tally.count, self._called.append, bound.forward
        guard = guarded(self.registered, "forward")

        def forward(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
        ) -> Any:
            rows, heads, length, _ = query.shape
            if self._aside:  # the layers of an encoder for sounds or images need not be numbered
                layer = guard.layer = getattr(module, "layer_idx", None)
            else:
                layer = guard.layer = module.layer_idx
                count(layer, length)
                note(layer)
            with guard:
                output, weights = inner(module, query, key, value, attention_mask, **kwargs)
            self._check("forward", output, (rows, length, heads, value.shape[3]), query, value)
            if self.tap is not None and layer is not None:
                self.tap.note(layer, query, key, value, output, None)
            return output, weights

        def replace(stand: Stand) -> Callable[[], None]:
            nonlocal inner
            inner = stand("attention", inner)
            return undo

        def undo() -> None:
            nonlocal inner
            inner = bound.forward

        self.replace = replace
        return forward

    def _check(
        self, what: str, output: Any, shape: tuple[int, ...], query: Any, value: Any
    ) -> None:
        if not isinstance(output, torch.Tensor):
            raise fault(self.registered, f"{what} must return a tensor first, got {quoted(output)}")
        dense = output.layout is torch.strided and not output.is_nested
        fits = dense and output.shape == shape and output.device == query.device
        if not fits or output.dtype not in (query.dtype, value.dtype):
            got = f"{list(output.shape)} in {output.dtype} on {output.device}" if dense else "it"
            raise fault(
                self.registered,
                f"{what} must return {list(shape)} in {query.dtype} on {query.device}, got {got}"
                + ("" if dense else " sparse or nested; make it dense"),
            )

    def _masking(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        guard = guarded(self.registered, "mask")

        @functools.wraps(inner)
        def mask(*args: Any, **kwargs: Any) -> Any:
            # Whether a mask could be left out is in these numbers, for which the host would wait in
            # every step. Where there is no padding, there is no attention_mask. A model that makes
            # a mask of its own makes it from this one: Doge in transformers 5.17 sees all without.
            numbers = (kwargs.get("attention_mask"), kwargs.get("q_offset"))
            there = any(isinstance(n, torch.Tensor) and n.device.type != "cpu" for n in numbers)
            if (self._whole_mask or there) and "allow_is_causal_skip" in kwargs:
                kwargs["allow_is_causal_skip"] = False
            if there and "allow_is_bidirectional_skip" in kwargs:
                kwargs["allow_is_bidirectional_skip"] = False
            with guard:
                return inner(*args, **kwargs)

        return mask

    def _packed(self, bound: BoundAttention, pages: PackedKVCache) -> Callable[..., Any]:
        """Store the step's keys and values in `pages`, then attend to what is there."""
        if bound.packed is None:
            raise fault(self.registered, "declares the packed layout but bound no `packed`")
        count, note, attend = self.tally.count, self._called.append, bound.packed
        guard, store = guarded(pages, "write"), pages.write
        inner: Callable[..., Any] = attend
        write: Callable[..., Any] = store
        sources = self._sources
        shared = set(sources.values())
        kept: dict[int, PackedLayer] = {}  # of the step, where other layers read them too

        def forward(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
        ) -> Any:
            if attention_mask is not None:
                raise ExecutionError(
                    f"{type(module).__name__} makes a mask of its own, which the packed layout has "
                    "no place for; choose a padded cache, e.g. 'dynamic'"
                )
            guard.layer = number = module.layer_idx
            guard.who, guard.what = pages, "write"
            with guard:  # one for both calls: entering it costs as much as a check
                if number in sources:
                    layer = kept[sources[number]]
                else:
                    layer = write(number, key[0].transpose(0, 1), value[0].transpose(0, 1))
                    if number in shared:
                        kept[number] = layer
                if self.blocks is not None:
                    self._mark(layer.tables, self.blocks)
                if self._recording is None:
                    for length in layer.step.query_lengths:
                        count(number, length)
                    note(number)
                elif number in self._recording:  # the step from its beginning, once more
                    self._recording[:] = [number]
                else:
                    self._recording.append(number)
                guard.who, guard.what = self.registered, "packed"
                output = inner(module, query[0].transpose(0, 1), layer, **kwargs)
            _, heads, tokens, _ = query.shape
            self._check("packed", output, (tokens, heads, value.shape[3]), query, value)
            if self.tap is not None and self._recording is None:
                self.tap.note(number, query, key, value, output[None], layer)
            return output[None], None

        def replace(stand: Stand) -> Callable[[], None]:
            nonlocal write, inner
            write, inner = stand("write", write), stand("attention", inner)
            return undo

        def undo() -> None:
            nonlocal write, inner
            write, inner = store, attend

        self.replace = replace
        return forward

    def _mark(self, tables: PageTables, blocks: Mapping[int | None, Blocks]) -> None:
        """Say which queries of the step see later keys, in layers with the window of `tables`."""
        if tables.blocks is None and tables.window in blocks:
            tables.blocks = blocks[tables.window]
            self._marked.append(tables)

    def _native(self, bound: BoundAttention, pages: PackedKVCache | None) -> NativeAttention | None:
        """What gives the calls in place of `_packed`; None: nothing."""
        if bound.native is None or pages is None:
            return None
        tapped = lambda: self.tap is not None  # noqa: E731 - it comes and goes
        understood = self._understood()
        return NativeAttention(self.registered, bound, pages, understood, tapped, self._sources)

    def attended(self, layers: Seq[int]) -> None:
        """The calls of `native` for each of `layers` were run."""
        assert self.native is not None
        for length in self.native.lengths:
            self.tally.count_all(layers, length)
        self._called.extend(layers)

    def _understood(self) -> frozenset[str]:
        """The keyword arguments that the backend declares to heed."""
        declared = self.registered.backend.capabilities  # type: ignore[attr-defined]
        return PLAIN_KWARGS | {
            kwarg for feature, kwarg in FEATURE_KWARGS.items() if feature in declared.features
        }

    def _declared(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """`inner`, which refuses by name what the backend does not declare; nothing is dropped."""
        understood = self._understood()

        def forward(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
        ) -> Any:
            if not kwargs.keys() <= understood and (others := stray(kwargs, understood)):
                raise self._strange(others)
            if kwargs.get("dropout"):
                raise ExecutionError(
                    f"{self.registered} is for inference and drops nothing out; call model.eval(), "
                    "or train with one of transformers' own attentions"
                )
            return inner(module, query, key, value, attention_mask, **kwargs)

        return forward

    def _strange(self, names: list[str]) -> ExecutionError:
        return ExecutionError(
            f"the model hands {', '.join(map(repr, names))} to its attention, which "
            f"{self.registered} does not declare; choose another attention, e.g. 'eager'"
        )

    def install(self, model: PreTrainedModel) -> Callable[[], None]:
        """Make `model` call this attention. Returns the function that puts back what was there."""
        self._configs = configs = decoder_configs(model)
        before = [config._attn_implementation_internal for config in configs]
        if self.implementation is not None:
            self._observe(model)
        for config in configs:
            config._attn_implementation_internal = self.key

        def restore() -> None:
            for config, implementation in zip(configs, before, strict=True):
                if config._attn_implementation_internal == self.key:  # else somebody's later wish
                    config._attn_implementation_internal = implementation
            self.remove()

        return restore

    def _observe(self, model: PreTrainedModel) -> None:
        """Count the calls of a model's own attention, which is not looked up by key."""
        count, note = self.tally.count, self._called.append
        for layer, module in attention_modules(model):

            def seen(_: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                if self._aside:
                    return
                states = args[0] if args else kwargs.get("hidden_states", kwargs.get("query"))
                count(layer, states.shape[1])
                note(layer)

            self._hooks.append(module.register_forward_pre_hook(seen, with_kwargs=True))

    def begin(self) -> None:
        """A step begins: what was called before it counts no more."""
        self._called.clear()
        while self._marked:
            self._marked.pop().blocks = None
        if self.tap is not None:
            self.tap.begin()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """What the model calls meanwhile is not counted: it is no step's."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[int]]:
        """Calls are noted and not counted; yields the layers that called, in the last of several
        runs of one step, each once."""
        calls: list[int] = []
        before, self._recording = self._recording, calls
        try:
            yield calls
        finally:
            self._recording = before

    def played(self, layers: Seq[int]) -> None:
        """A decode step was played whose recording holds a call of each of `layers`."""
        self.tally.count_all(layers, 1)
        self._called.extend(layers)

    def check_selected(self) -> None:
        """Raise ExecutionError where the model names another attention than this one by now."""
        for config in self._configs:
            # Asked in every step, and a config's own way to its attributes takes long.
            now = object.__getattribute__(config, "_attn_implementation_internal")
            if now != self.key:
                raise ExecutionError(
                    f"the model's attention was switched to {now!r} while an engine runs it with "
                    f"{self.registered}; close the engine first, then load the model again"
                )

    def check_called(self, by: object = "the model") -> None:
        """Raise where a layer was not called in the step, or `by` its caller more than once.

        Several calls are right only where the probe saw them, or could not see anything.
        """
        called = list(self._called)
        if called == self._planned:
            return
        if missed := sorted(self.expected - set(called)):
            raise self._unreached(by, f"was not called by layers {missed}")
        if again := sorted(n for n in self.expected if called.count(n) > 1) if self._once else ():
            raise self._unreached(by, f"was called more than once a step by layers {again}")
        self._planned = called  # in an order of the model's own

    def _unreached(self, by: object, what: str) -> ExecutionError | PluginError:
        if isinstance(by, Registered):
            return fault(by, f"in its compiled step {self.registered} {what}")
        return ExecutionError(f"{self.registered} {what}: {by} does not run what was chosen")

    def remove(self) -> None:
        """Take the key out of transformers' tables, and the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.key.startswith(KEY):
            AttentionInterface._global_mapping.pop(self.key, None)
            AttentionMaskInterface._global_mapping.pop(self.key, None)
        self._close_backend()

    def _close_backend(self) -> None:
        if self._close is not None:
            with guarded(self.registered, "close"):
                self._close()


def decoder_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs in which `model` keeps the name of its decoder's attention; its encoder's too."""
    if has_encoder(model.config):
        return part_configs(model)
    text = model.config.get_text_config(decoder=True)
    return [model.config] if text is model.config else [model.config, text]
