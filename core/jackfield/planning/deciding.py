"""From a caller's arguments to a plan: the model is found, its requirements, adapter and places.

`selecting.py` decides the backends.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.bridge.adapters import FoundAdapter, find_adapter, live_adapter
from jackfield.bridge.blame import blamed
from jackfield.bridge.devices import is_here
from jackfield.bridge.layers import layers_for
from jackfield.bridge.lora import FoundLora
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.placement import Placement
from jackfield.bridge.requirements import requirements_of
from jackfield.bridge.sharding import Shard, check_adapted
from jackfield.bridge.shared_models import shared_out
from jackfield.bridge.source import ModelSource, find
from jackfield.bridge.spreading import placed_live
from jackfield.contracts.quantizing import Quantizer, plain_bytes
from jackfield.contracts.requirements import Requirements, Weight
from jackfield.errors import PlanError, UsageError
from jackfield.planning.beside import DEFAULT, Beside, found_beside, plain, with_weights
from jackfield.planning.device_map import Asked, asked
from jackfield.planning.encoder import check_goes_with
from jackfield.planning.fitting import check_size
from jackfield.planning.heads import with_heads
from jackfield.planning.placing import first_device, place
from jackfield.planning.planning import Plan
from jackfield.planning.selecting import decide
from jackfield.planning.sharing import check_shared, own_device, shard_of
from jackfield.planning.spec import PlanSpec
from jackfield.planning.stored import check_stored
from jackfield.registry.backends import Registry
from jackfield.spelling import AUTO, Quantizable

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger("jackfield")


@dataclass(frozen=True)
class Job:
    """A model that was found, and what it needs; no backend is chosen yet.

    `found` is the adapter on top of all requests, and `plain` the same where it can be computed
    beside any layers. `beside` are those that requests choose from; None: no request may. `shard`
    is the part of it that this process is to have; None: all of it.
    """

    source: ModelSource
    asked: Asked
    needs: Requirements
    found: FoundAdapter | None = None
    plain: FoundLora | None = None
    beside: Mapping[str, FoundLora] | None = None
    shard: Shard | None = None

    def decide(self, registry: Registry, selections: Mapping[str, Quantizable]) -> Plan:
        """One backend a kind, and a place for every weight. Raises the errors of a plan.

        Places depend on the quantizer's bytes, and what fits depends on the places: where weights
        do not go to the one device that was assumed, it is decided again.
        """
        check_stored(registry, self.source, self.needs)
        needs, plan, tried = self.needs, decide(registry, self.needs, selections), []
        while (where := self._placed(registry, plan)).spread:
            quantizer = plan["quantizer"].registered
            if quantizer in tried:
                break
            tried.append(quantizer)
            plan = decide(registry, spread_over(needs, where), selections)
            if plan["quantizer"].registered is quantizer:
                break
        plan = self.with_layers(plan)
        self._check_adapter(plan)
        held = {name: found.adapter for name, found in (self.beside or {}).items()}
        plan = replace(plan, placement=where, adapter=self._adapter(), adapters=held)
        return with_heads(plan, self.source, as_it_is=_as_it_is(plan))

    def held(self, plan: Plan, most: int) -> Beside | None:
        """The adapters that an engine computes beside the layers; None: PEFT does, or nobody."""
        if self.beside is not None:
            return Beside(self.beside, most, shard=self.shard)
        if self.plain is None or not self._apart(plan):
            return None
        return Beside({DEFAULT: self.plain}, 1, DEFAULT, self.shard)

    def _apart(self, plan: Plan) -> bool:
        """Whether an adapter is computed beside layers on which PEFT cannot put its own."""
        quantizer = plan["quantizer"].backend
        assert isinstance(quantizer, Quantizer)
        return self.shard is not None or not quantizer.capabilities.adapters

    def _check_adapter(self, plan: Plan) -> None:
        """Raise PlanError where steps are compiled of layers that an adapter is beside."""
        if self.plain and self._apart(plan) and plan.requirements.compiled:
            raise PlanError(
                f"the adapter is computed beside the layers of {plan['quantizer'].registered}, "
                f"which {plan['compiler'].registered} would compile without it; drop compile"
            )

    def with_layers(self, plan: Plan) -> Plan:
        """`plan`, of whose kernels that `auto` chose those are left that find a layer of their own.

        Raises PlanError where one that is named finds no layer in the model, or two find the same.
        Of a model that is not loaded, as far as its config shows its layers: what a quantizer or an
        adapter puts in their place is known later.
        """
        if not plan.kernels:
            return plan
        model: nn.Module | None = self.source.live
        if model is None and self.found is None and _as_it_is(plan):
            model = meta_model(self.source.config)
        kept = [choice for choice in plan.kernels if choice.how != AUTO]
        if model is not None:
            layers_for(kept, model)
        for choice in plan.kernels:
            if choice.how != AUTO:
                continue
            try:
                if model is None:
                    raise PlanError("what its layers will be is not known before weights are read")
                layers_for([*kept, choice], model)
            except PlanError as error:
                logger.info("auto goes on without %s: %s", choice.registered, error)
            else:
                kept.append(choice)
        return replace(plan, kernels=tuple(kept))

    def _adapter(self) -> Any:
        return self.found.adapter if self.found else live_adapter(self.source)

    def _placed(self, registry: Registry, plan: Plan) -> Placement:
        if self.source.live is not None:
            return placed_live(self.source.live)
        where = place(self.asked, self.source, plan.requirements, _scale(plan))
        if where.offloaded and self.found and self.found.reads_weights:
            raise UsageError(
                f"the adapter {self.found.adapter.location} reads the weights below it when it is "
                "merged, or as DoRA; they cannot be offloaded: name one device"
            )
        if not where.spread:
            check_size(registry, plan, self.asked, where)
        return where


def _check_cut(job: Job, *loras: FoundLora) -> None:
    """Raise PlanError where a layer is cut into other parts than adapters can be."""
    if job.shard is not None:
        meta = meta_model(job.source.config)
        for one in loras:
            check_adapted(meta, one.targets, job.shard)


def spread_over(needs: Requirements, where: Placement) -> Requirements:
    """`needs` where weights go to several places, or to disk."""
    device, _, number = where.device.partition(":")
    return replace(
        needs,
        device=device,
        device_index=int(number) if number else None,
        execution_devices=where.execution_devices,
        offloaded=where.offloaded,
    )


def _scale(plan: Plan) -> Any:
    """What the chosen quantizer makes of each weight, in bytes."""
    choice, needs = plan["quantizer"], plan.requirements

    def weigh(weight: Weight) -> int | None:
        alone = replace(needs, weights=(weight,))
        return choice.registered.size("weight_bytes", alone, choice.options)

    return weigh


def _as_it_is(plan: Plan) -> bool:
    """Whether every weight is stored as it is, by what the quantizer says that they take."""
    needs, quantizer = plan.requirements, plan["quantizer"]
    size = quantizer.registered.size("weight_bytes", needs, quantizer.options)
    return needs.stored is None and size == plain_bytes(needs)


def resolve_job(model: str | Path | PreTrainedModel | PreTrainedConfig, spec: PlanSpec) -> Job:
    """Find a model and derive what it needs. Raises a UsageError; reads no weight."""
    if sys.flags.optimize > 1:
        raise UsageError(
            "Python runs with -OO, which takes away docstrings, and transformers reads them to "
            "define its models; run it with -O, or without"
        )
    said = asked(spec.device_map, spec.max_memory, spec.offload_folder)
    said = replace(said, device_memory=spec.device_memory)
    source = find(model, spec.revision)
    check_goes_with(source, spec)
    shard = shard_of(spec)
    if shard is not None:
        check_shared(source, shard)
        said = own_device(said, shard)
    first = first_device(said, source)
    device = AUTO if source.live is not None else first
    with blamed(source):
        needs = requirements_of(
            source, dtype=spec.dtype, device=device, deterministic=spec.deterministic
        )
        if shard is not None:
            needs = shared_out(source.config, needs, shard)
        elsewhere = spec.device_memory is not None and not is_here(first)
        needs = replace(needs, elsewhere=elsewhere)
    if isinstance(said.device_map, Mapping):
        where = Placement(str(first), said.device_map, {})
        needs = spread_over(needs, where) if where.spread else needs
    return _with_adapters(Job(source, said, needs, shard=shard), spec)


def _with_adapters(job: Job, spec: PlanSpec) -> Job:
    """The same with the adapters that are asked for, or that a live model has."""
    source, needs = job.source, job.needs
    if spec.merge_adapter and spec.adapter is None:
        raise UsageError("merge_adapter=True merges an adapter, and none is given; add adapter=…")
    if (beside := found_beside(spec, source)) is not None:
        _check_cut(job, *beside.values())
        added = [weight for found in beside.values() for weight in found.weights]
        needs = replace(with_weights(needs, added), request_adapters=True)
        return replace(job, needs=needs, beside=beside)
    if spec.adapter is None:
        own = live_adapter(source)
        return replace(job, needs=replace(needs, adapter=own.peft_type if own else None))
    if source.live is not None:
        raise UsageError(
            "a live model is used as it is: put the adapter on it yourself with "
            "model.load_adapter(…), or give the model's folder"
        )
    meta = meta_model(source.config)
    found = find_adapter(spec.adapter, meta, merge=spec.merge_adapter)
    alone = None if spec.merge_adapter else plain(found, meta)
    if job.shard is not None and alone is None:
        raise UsageError(
            f"the adapter {found.adapter.location} is more than a LoRA of linear layers, which is "
            f"all that tp_size={job.shard.size} processes compute; load it in one process"
        )
    _check_cut(job, *([alone] if alone else ()))
    needs = replace(
        with_weights(needs, alone.weights if alone else found.weights),
        adapter=None if alone else found.adapter.peft_type,
        merge_adapter=spec.merge_adapter,
    )
    return replace(job, needs=needs, found=found, plain=alone)
