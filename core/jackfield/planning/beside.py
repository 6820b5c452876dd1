"""Adapters that are computed beside a model's layers: which, and what does not go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jackfield.bridge.adapters import FoundAdapter, live_adapter
from jackfield.bridge.lora import FoundLora, check_name, find_lora, lora_of
from jackfield.contracts.requirements import BYTES, Requirements, Weight
from jackfield.errors import CheckpointError, UsageError, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from jackfield.bridge.sharding import Shard
    from jackfield.bridge.source import ModelSource
    from jackfield.planning.spec import PlanSpec


DEFAULT = "default"  # the name of an adapter that all requests have


@dataclass(frozen=True)
class Beside:
    """The adapters that an engine begins with, by name, and how many it may hold.

    `default` is the one of requests that name none; None: those have the weights alone. `shard` is
    the part of the layers that this process has; None: all of them.
    """

    loras: Mapping[str, FoundLora]
    most: int
    default: str | None = None
    shard: Shard | None = None


def found_beside(spec: PlanSpec, source: ModelSource) -> dict[str, FoundLora] | None:
    """The adapters of `adapters={…}`, checked; None: it was not given. Raises UsageError."""
    given = spec.adapters
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UsageError(
            f"adapters maps names to folders or hub ids, as in adapters={{'fr': 'FOLDER'}}; not "
            f"{quoted(given)}"
        )
    for name in ("adapter", "deterministic", "verify"):
        if getattr(spec, name, None):
            raise UsageError(f"{name} does not go with adapters: {_APART[name]}")
    if (own := live_adapter(source)) is not None:
        raise UsageError(
            f"the model has an adapter of its own ({own.location}), which does not go with "
            "adapters; remove it, or give the model's folder"
        )
    for name in given:
        check_name(name)
    return {name: find_lora(source.config, location) for name, location in given.items()}


_APART = {
    "adapter": "give all in adapters={'NAME': 'FOLDER'}, and name one in each request",
    "deterministic": "which rows are computed together depends on their adapters; drop one of them",
    "verify": "the model is computed again without adapters; drop one of them",
}


def plain(found: FoundAdapter, meta: PreTrainedModel) -> FoundLora | None:
    """An adapter as one beside the layers, where it can be that; `meta` has it."""
    try:
        return lora_of(found, meta)
    except CheckpointError:
        return None


def with_weights(needs: Requirements, added: Sequence[Weight]) -> Requirements:
    """`needs` with the weights that adapters add, in the model's own dtype."""
    size = sum(w.numbers * BYTES[w.dtype or needs.dtype] for w in added)
    return replace(needs, weights=(*needs.weights, *added), weight_bytes=needs.weight_bytes + size)
