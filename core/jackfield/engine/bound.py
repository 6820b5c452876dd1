"""A model bound to a plan: its cache, its attention installed, and one forward call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jackfield.bridge.adapter_switch import AdapterSwitch
from jackfield.bridge.attention import AttentionBinding, decoder_configs
from jackfield.bridge.encoders import TextEncoder, cached_config
from jackfield.bridge.feature_encoder import FeatureEncoder
from jackfield.bridge.features import reads_features
from jackfield.bridge.footprint import stored_as
from jackfield.bridge.forward import forward_of
from jackfield.bridge.layers import bind_layers
from jackfield.bridge.state_layers import state_layers
from jackfield.bridge.unchanged import Unchanged
from jackfield.contracts import BindContext, Compilation, KVCache, PackedKVCache
from jackfield.engine.adapters import Adapters
from jackfield.engine.checked_packed import held_to_contract
from jackfield.engine.encoded import EncodedCache
from jackfield.engine.layouts import laid_out
from jackfield.engine.reading import in_use
from jackfield.engine.stateful import StatefulCache
from jackfield.errors import ExecutionError, PlanError, UsageError
from jackfield.guarded import all_of
from jackfield.planning.beside import Beside
from jackfield.planning.fused import is_traceable
from jackfield.planning.planning import Plan
from jackfield.registry.backends import Choice
from jackfield.spelling import AUTO

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from jackfield.bridge.compiled import CompiledForward
    from jackfield.contracts import ModelInputs


def install_all(models: Iterable[BoundModel]) -> list[Callable[[], None]]:
    """Install all of them or none; returns what gives each back."""
    restore: list[Callable[[], None]] = []
    try:
        restore.extend(model.install() for model in models)
    except BaseException:
        all_of(restore)
        raise
    return restore


class BoundModel:
    """What the loop calls of a model. Nothing is changed in the model before `install`.

    `step_bytes`, `memory_share`, `free` and `max_chunk_size` are for its cache, as in
    `BindContext`; `beside` are the adapters that it begins with, None where none may come.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        step_bytes: int = 0,
        memory_share: float = 1.0,
        free: int | None = None,
        beside: Beside | None = None,
        max_chunk_size: int | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.attention: AttentionBinding  # bound with `install`, into transformers' tables
        dtype = plan.requirements.dtype
        self.adapters = None if beside is None else Adapters(model, beside, dtype)
        self.adapter = self._switch()
        self.layers = bind_layers(
            plan.kernels, model, lambda choice: self.context("kernel", choice)
        )
        self.compiled = self._compiled()
        self._forward = self.compiled or forward_of(
            model, fixed_shapes=plan.requirements.batch_invariant
        )
        # Last, as it takes memory that whoever fails behind it would have to give back.
        cache = plan["cache"].registered
        context = replace(
            self.context("cache"), step_bytes=step_bytes, memory_share=memory_share, free=free,
            max_chunk_size=max_chunk_size,
        )  # fmt: skip
        bound = laid_out(cache.bind(context), context)
        users = [plan[kind].registered for kind in ("attention", "compiler")]
        self.cache: KVCache = held_to_contract(bound, cache, plan.requirements.windows, users)
        # What has layers with a state compute a step of ours.
        self._computing: Callable[[], AbstractContextManager[None]] = nullcontext
        stateful = "linear_attention" in plan.requirements.layer_types
        if stateful and isinstance(self.cache, PackedKVCache):
            self.cache = states = StatefulCache(self.cache, cache, state_layers(model))
            self._computing = states.computing
        #: what reads prompts; None: the model's decoder does
        self.encoder: TextEncoder | FeatureEncoder | None = None
        if plan.requirements.encoder is not None:
            given = reads_features(model.config)
            self.encoder = FeatureEncoder(model) if given else TextEncoder(model)
            self.cache = EncodedCache(self.cache, cache, self.encoder, self.aside)
        self._holds = True
        self._steps = False  # a step goes on

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Logits `[rows, k, vocab]` of one step.

        Raises ExecutionError or PluginError where the step did not run what was chosen: every
        layer's attention once, or as often as it did in the probe; and where the model was cast
        or moved.
        """
        attention, compiled = self.attention, self.compiled
        before = compiled.steps if compiled is not None else 0
        self.unchanged.check_weights()
        attention.begin()
        attention.blocks = inputs.blocks
        self._steps = True
        try:
            with self._computing():
                logits = self._forward(inputs)
        except BaseException:
            attention.check_selected()  # which is then the cause
            raise
        finally:
            self._steps, attention.blocks = False, None
        attention.check_selected()
        if self.adapters is not None:
            self.adapters.check_called()
        if compiled is not None and compiled.steps > before:
            attention.check_called(self.plan["compiler"].registered)
        else:
            attention.check_called()
        return logits

    @property
    def overlaps(self) -> bool:
        """Whether a GPU computes its steps, which can be laid out before their tokens are known."""
        ahead = isinstance(self.cache, PackedKVCache) and self.cache.overlaps
        return ahead and self.context("cache").device.type == "cuda"

    def aside(self) -> AbstractContextManager[None]:
        """Calls of the attention are no step's meanwhile."""
        return self.attention.set_aside()

    def check_unchanged(self) -> None:
        """A request comes. ExecutionError: the model or its config is not what was planned."""
        self.unchanged.check_weights()
        self.unchanged.check_config()
        if self.compiled is not None:
            self.compiled.compilation.anew = True

    def context(self, kind: str, choice: Choice | None = None) -> BindContext:
        """What the backend chosen for `kind` is bound to, or another `choice` of that kind."""
        return BindContext(
            model=self.model,
            config=cached_config(self.model.config),
            requirements=self.plan.requirements,
            options=(choice or self.plan[kind]).options,
        )

    def _switch(self) -> Adapters | AdapterSwitch | None:
        """What switches the adapter that all requests have; None where there is none."""
        if self.adapters is not None:
            return self.adapters
        return AdapterSwitch(self.model, self.plan.adapter) if self.plan.adapter else None

    def _compiled(self) -> CompiledForward | None:
        compilation = self.plan["compiler"].registered.bind(self.context("compiler"))
        if not isinstance(compilation, Compilation):
            return None
        from jackfield.bridge.compiled import CompiledForward
        from jackfield.bridge.native_offers import held_offers

        kernels = [layers.registered for layers in self.layers]
        offering = [self.plan["quantizer"].registered, *filter(is_traceable, kernels)]
        operators = held_offers(offering, self.model)
        compiler = self.plan["compiler"].registered
        sources = dict(self.plan.requirements.shared_layers)
        return CompiledForward(self.model, compilation, compiler, operators, sources)

    def switch_adapter(self, *, on: bool) -> None:
        """Run with the adapter, or without it; nothing may be running. Raises UsageError."""
        if self.adapter is None:
            raise UsageError("the engine has no adapter to switch; load it with adapter=…")
        self.adapter.switch(on=on)
        self.cache.forget()

    def compile_ahead(self, most: int, *, prompts: bool) -> list[int]:
        """Compile decode steps of up to `most` sequences now; their sizes, none where it cannot."""
        if self.compiled is None:
            return []
        packed = isinstance(self.cache, PackedKVCache)
        return self.compiled.ahead(most, packed=packed, prompts=prompts)

    def record(self, most: int) -> None:
        """Record whole decode steps of up to `most` sequences, where that was planned."""
        if self.compiled is not None and self.plan.recording == ():
            backends = [self.plan[kind].registered for kind in ("attention", "cache", "compiler")]
            backends += [layers.registered for layers in self.layers]
            longest = self.plan.requirements.context_length
            named = self.plan["compiler"].how != AUTO
            traced = self.plan.requirements.traced
            self.compiled.record(
                self.cache, self.attention, most, longest, backends, self.layers,
                traced=traced, named=named,
            )  # fmt: skip

    def install(self) -> Callable[[], None]:
        """Make the model run what was bound. Returns the function that gives it back as it was."""
        model = self.model
        self.stored = stored_as(model, self.plan["quantizer"].registered)
        self.unchanged = Unchanged(model)
        self.attention = AttentionBinding(
            self.plan["attention"].registered,
            self.context("attention"),
            model,
            self.cache if isinstance(self.cache, PackedKVCache) else None,
        )
        try:
            if self.compiled is not None:
                self.compiled.attend = self._replaceable(self.attention)
                self.compiled.native = self.attention.native
                self.compiled.attended = self.attention.attended
            undo = [self.attention.install(model)]
        except BaseException:
            self.attention.remove()
            raise
        traced = self.compiled is not None and self.plan.requirements.traced
        inside = [layers for layers in self.layers if not traced or is_traceable(layers.registered)]
        undo += [layers.install() for layers in inside]
        if self.compiled is not None and traced:
            self.compiled.traced = inside
            self.compiled.layers = [layers for layers in self.layers if layers not in inside]
        if isinstance(self.cache, StatefulCache):
            undo.append(self.cache.install())
        if self.plan.requirements.tp_size > 1:
            for module in {model, model.base_model}:
                undo.append(module.register_forward_pre_hook(self._check_called_by_us).remove)
        trained = [module for module in model.modules() if module.training]
        model.eval()
        in_use.update(map(id, decoder_configs(model)))

        def as_before() -> None:
            for module in trained:
                module.training = True
            in_use.difference_update(map(id, decoder_configs(model)))

        if self.compiled is not None:
            undo.append(self.compiled.close)
        undo.append(self.close)
        if self.adapter is not None:
            undo.append(self.adapter.restore)
        return partial(all_of, (as_before, *undo))

    def _check_called_by_us(self, *_: object) -> None:
        """ExecutionError: somebody else calls a shared model, and would wait for the others."""
        if not self._steps:
            size = self.plan.requirements.tp_size
            raise ExecutionError(
                f"the model was called by somebody else than its engine, and {size} processes "
                "share it, which compute its steps alone; ask the engine, or load it in one process"
            )

    def close(self) -> None:
        """Let go of the cache's memory, once."""
        if self._holds:
            self._holds = False
            self.cache.close()

    def _replaceable(self, attention: AttentionBinding) -> Callable[..., Any]:
        if attention.forward is None:
            raise PlanError(
                f"{type(self.model).__name__} calls an attention of its own, which cannot be taken "
                "out of a compiled step; load it without compile"
            )
        return attention.forward
