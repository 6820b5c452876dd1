"""The cache kind: where keys and values live, and which layout a step has because of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, unknown
from jackfield.contracts.requirements import DTYPES, LAYOUTS, Requirements

if TYPE_CHECKING:
    import torch

    from jackfield.contracts.packed import PackedLayer
    from jackfield.sequences import Sequence, Step

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True, kw_only=True)
class CacheCapabilities:
    """What a cache backend declares it can do. What is not declared is not had.

    `rollback`: tokens that were fed can be taken back (rejected drafts).
    `static_shapes`: buffers keep their address and shape from step to step.
    """

    layout: str
    layer_types: frozenset[str]
    dtypes: frozenset[str] = frozenset(DTYPES)
    rollback: bool = False
    static_shapes: bool = False

    def __post_init__(self) -> None:
        unknown({self.layout}, LAYOUTS, "layout")
        unknown(self.layer_types, LAYER_TYPES, "layer type")
        unknown(self.dtypes, DTYPES, "dtype")
        if not (self.layer_types and self.dtypes):
            raise ValueError("a cache needs at least one layer type and one dtype")

    def lacks(self, requirements: Requirements) -> list[str]:
        """Each requirement that is not met, as a reason."""
        reasons = [
            f"does not hold {layer_type} layers"
            for layer_type in sorted(set(requirements.layer_types) - self.layer_types)
        ]
        if requirements.dtype not in self.dtypes:
            reasons.append(f"does not hold dtype {requirements.dtype}")
        if requirements.rollback and not self.rollback:
            reasons.append("cannot take back tokens (rollback), which the decoding strategy needs")
        return reasons


@dataclass(frozen=True)
class ModelInputs:
    """The keyword arguments of one forward call; valid until the next `prepare`.

    The model's logits become `[rows, k, vocab]`, one row per feed of the step, where the last `k`
    positions of row i line up with the last `k` tokens of feed i.
    """

    kwargs: dict[str, Any]
    rows: int


class KVCache(ABC):
    """The keys and values of the running sequences, bound to one model.

    The loop calls `prepare` and `commit` in turn, once a step; `release` in between. A sequence
    enters with the first step that feeds it.
    """

    @abstractmethod
    def prepare(self, step: Step) -> ModelInputs:
        """Lay out the tokens of `step` for one forward call that stores their keys and values."""

    @abstractmethod
    def commit(self, step: Step, kept: Seq[int]) -> None:
        """Keep the first `kept[i]` tokens of feed i, give back the rest.

        Sets `num_cached` of every sequence in `step`.
        """

    @abstractmethod
    def release(self, sequences: Seq[Sequence]) -> None:
        """Forget these sequences and give their memory back. Unknown ones are ignored."""

    @abstractmethod
    def room(self) -> int | None:
        """How many sequences may join the next step; None: any number."""


class PackedKVCache(KVCache):
    """A cache of the packed layout: it stores keys and values itself, for the attention to read."""

    @abstractmethod
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        """Store this step's `[tokens, kv_heads, head_dim]` of one layer; returns what to read.

        Called once a layer, between `prepare` and `commit`.
        """


class Cache(Backend):
    """Where K and V live. `bind` is called once per model."""

    kind: ClassVar[str] = "cache"
    bound: ClassVar[tuple[type, ...]] = (KVCache,)
    capabilities: ClassVar[CacheCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare `requirements` with `capabilities`; extend it for what those cannot express."""
        del options
        return self.capabilities.lacks(requirements)

    def imply(self, requirements: Requirements) -> Requirements:
        return replace(requirements, layout=self.capabilities.layout)

    @abstractmethod
    def bind(self, context: BindContext) -> KVCache:
        """Return an empty cache for `context.model`."""

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), CacheCapabilities):
            found.append("`capabilities` must be a CacheCapabilities")
        return found
