"""A model's own heads for multi-token prediction: found and counted before weights are read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from jackfield.bridge.headers import check_files
from jackfield.bridge.hub_files import is_whole
from jackfield.bridge.mtp import checkpoint_of, heads_found
from jackfield.bridge.source import ModelSource
from jackfield.contracts.requirements import BYTES
from jackfield.errors import PlanError
from jackfield.planning.memory import PlannedHeads
from jackfield.planning.planning import Plan

_OTHER = "choose another decoding"


def with_heads(plan: Plan, source: ModelSource, *, as_it_is: bool) -> Plan:
    """`plan` with the heads that its decodings need. Raises PlanError where it cannot have them.

    `as_it_is`: weights are stored in no other way than in the dtype of the model.
    """
    asked = next((n for n, c in plan.decodings.items() if c.backend.capabilities.heads), None)
    if asked is None:
        return plan
    needs = plan.requirements
    if not as_it_is:
        raise PlanError(
            f"decoding {asked!r}: heads are read as they are stored, and weights are not with "
            f"{plan['quantizer'].registered}; drop quantization, or {_OTHER}"
        )
    if plan.adapter is not None:
        raise PlanError(
            f"decoding {asked!r}: heads were trained without {plan.adapter}, which changes what "
            f"they read; merge it and save the model with its heads, or {_OTHER}"
        )
    found = heads_found(source, needs.dtype, _tensors(source, f"decoding {asked!r}"))
    a_layers = max(needs.kv_numbers, default=0) * BYTES[needs.dtype]
    heads = PlannedHeads(found.layers, found.weight_bytes, found.layers * a_layers)
    return replace(plan, heads=heads)


def _tensors(source: ModelSource, asked: str) -> Collection[str]:
    """The names of a checkpoint's tensors; none where it is not here yet, or is a config alone."""
    if source.gguf is not None:
        raise PlanError(f"{asked} reads no heads out of a GGUF file; {_OTHER}")
    folder = checkpoint_of(source)
    if folder is None:
        if source.live is None:
            return ()
        raise PlanError(
            f"{asked} reads heads from the checkpoint of a model, and this live "
            f"{type(source.live).__name__} came from none that is here; give the folder itself"
        )
    stated = getattr(source.config, "transformers_weights", None)
    return check_files(folder, stated) if is_whole(folder, stated) else ()
