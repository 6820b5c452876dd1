"""A model bound to a plan: its cache, its attention plugged in, and one forward call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jackfield.bridge.attention import AttentionPort, decoder_configs
from jackfield.bridge.footprint import stored_as
from jackfield.bridge.forward import forward_of
from jackfield.bridge.requirements import pick_device
from jackfield.bridge.source import ModelSource
from jackfield.bridge.weights import load_model
from jackfield.contracts import BindContext, Compilation, KVCache, PackedKVCache
from jackfield.errors import PlanError, UsageError
from jackfield.planning import Choice, Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.bridge.compiled import CompiledForward

#: The ids of configs that an engine has changed and will give back; models may share one.
_in_use: set[int] = set()


def weights(source: ModelSource, plan: Plan, device_map: str) -> PreTrainedModel:
    """The model of `source`, loaded as planned; a live one as it is."""
    if source.live is None:
        device = pick_device(device_map, source)
        choice = plan["quantizer"]
        context = BindContext(
            model=None,
            config=source.config,
            requirements=plan.requirements,
            options=choice.options,
        )
        return load_model(source, plan.requirements.dtype, device, choice.registered.bind(context))
    if not _in_use.isdisjoint(map(id, decoder_configs(source.live))):
        raise UsageError(
            "this model, or one that shares its config, already runs in an engine; close that one "
            "first, or give the model a config of its own"
        )
    if str(source.live.dtype).removeprefix("torch.") != plan.requirements.dtype:
        raise UsageError(
            f"the model is in {source.live.dtype} and is used as it is; convert it yourself, or "
            "drop dtype"
        )
    return source.live


class BoundModel:
    """What the loop calls of a model. Nothing is changed in the model before `plug`."""

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self.model = model
        self.plan = plan
        self.cache: KVCache = plan["cache"].registered.bind(self.context("cache"))
        self.port = AttentionPort(
            plan["attention"].registered,
            self.context("attention"),
            model,
            self.cache if isinstance(self.cache, PackedKVCache) else None,
        )
        compilation = plan["compiler"].registered.bind(self.context("compiler"))
        self.compiled = self._compiled(compilation) if plan.requirements.compiled else None
        self.forward = self.compiled or forward_of(
            model, fixed_shapes=plan.requirements.batch_invariant
        )
        self.stored = stored_as(model, plan["quantizer"].registered)

    def context(self, kind: str, choice: Choice | None = None) -> BindContext:
        """What the backend chosen for `kind` is bound to, or another `choice` of that kind."""
        return BindContext(
            model=self.model,
            config=self.model.config,
            requirements=self.plan.requirements,
            options=(choice or self.plan[kind]).options,
        )

    def _compiled(self, compilation: Compilation) -> CompiledForward:
        from jackfield.bridge.compiled import CompiledForward

        if self.port.forward is None:
            raise PlanError(
                f"{type(self.model).__name__} calls an attention of its own, which cannot be taken "
                "out of a compiled step; load it without compile"
            )
        return CompiledForward(self.model, self.port.forward, compilation)

    def plug(self) -> Callable[[], None]:
        """Make the model run what was bound. Returns the function that gives it back as it was."""
        model = self.model
        unplug = self.port.plug(model)
        trained = [module for module in model.modules() if module.training]
        model.eval()
        _in_use.update(map(id, decoder_configs(model)))

        def give_back() -> None:
            unplug()
            for module in trained:
                module.training = True
            _in_use.difference_update(map(id, decoder_configs(model)))

        return give_back
