"""The cache kind: where keys and values live, and which layout a step has because of it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import BindContext, Recordable, unknown
from jackfield.contracts.kv_cache import KVCache, PaddedCache
from jackfield.contracts.packed import PACKED_LAYER_TYPES, not_packed
from jackfield.contracts.requirements import DTYPES, LAYOUTS, Requirements
from jackfield.contracts.sizes import known, kv_bytes

if TYPE_CHECKING:
    import transformers


LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True, kw_only=True)
class CacheCapabilities:
    """What a cache backend declares it can do.

    A capability that is not declared counts as missing.

    Violations: the methods that it then lacks fail, or their results do; see `KVCache`.

    Attributes:
        layout: "padded" (batch × time) or "packed" (all tokens of a step in one row).
        layer_types: Those that it holds: "full_attention", "sliding_attention" and, padded only,
            "chunked_attention" and "linear_attention". Beside a packed cache the engine keeps the
            states of "linear_attention" itself.
        dtypes: Those of keys and values.
        rollback: The layer types whose tokens can be taken back once they were fed (rejected
            drafts).
        static_shapes: Buffers keep their address and shape from step to step.
        compiles: A compiled step may hand it keys and values from outside of the model's code: in
            the packed layout through `write`, in the padded one through the `update` of the
            `past_key_values` that it prepared.
        forks: A sequence can go on as a copy of another (`KVCache.fork`).
        recordable: Steps in which every sequence feeds one token can lie at the same addresses each
            time (`KVCache.fix`); packed only.

    Raises:
        ValueError: A name is unknown, or a set is empty that must not be.
    """

    layout: str
    layer_types: frozenset[str]
    dtypes: frozenset[str] = frozenset(DTYPES)
    rollback: frozenset[str] = frozenset()
    static_shapes: bool = False
    compiles: bool = False
    forks: bool = False
    recordable: bool = False

    def __post_init__(self) -> None:
        unknown({self.layout}, LAYOUTS, "layout")
        unknown(self.layer_types, LAYER_TYPES, "layer type")
        if self.layout == "packed":
            unknown(self.layer_types, PACKED_LAYER_TYPES, "layer type of the packed layout")
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.rollback, self.layer_types, "layer type to roll back")
        if self.recordable and self.layout != "packed":
            raise ValueError("recordable is for the packed layout; masks of the padded one move")
        if not (self.layer_types and self.dtypes):
            raise ValueError("a cache needs at least one layer type and one dtype")

    def lacks(self, requirements: Requirements) -> list[str]:
        """Each of `requirements` that is not met, as a reason."""
        packed = self.layout == "packed"
        beside = {"linear_attention"} if packed else set()  # whose states the engine keeps
        missing = set(requirements.layer_types) - self.layer_types - beside
        reasons = [f"does not hold {layer_type} layers" for layer_type in sorted(missing)]
        if requirements.dtype not in self.dtypes:
            reasons.append(f"does not hold dtype {requirements.dtype}")
        if requirements.batch_invariant and not packed:
            reasons.append("pads rows to the longest, so a text depends on its batch")
        if requirements.compiled and not self.compiles:
            reasons.append("is not known to work with steps that are compiled")
        if (
            requirements.compiled
            and self.layout == "padded"
            and requirements.kv_numbers != requirements.packed_numbers
        ):
            reasons.append("keeps less than the attention reads, which a compiled step cannot")
        if requirements.rollback and (reason := self._stuck(requirements)):
            reasons.append(f"{reason}, which the decoding strategy needs")
        if requirements.forks and not self.forks:
            reasons.append("cannot copy a sequence (forks), which the decoding strategy needs")
        return reasons

    def _stuck(self, requirements: Requirements) -> str | None:
        if not self.rollback:
            return "cannot take back tokens (rollback)"
        held = self.layer_types | {"linear_attention"}
        stuck = sorted(set(requirements.layer_types) & held - self.rollback)
        if stuck:
            return f"cannot take back tokens of {', '.join(stuck)} layers (rollback)"
        wrong = requirements.pieces or requirements.holes
        if wrong and self.layout == "padded":
            return f"cannot take back tokens (rollback) of this model ({wrong})"
        return None


class Cache(Recordable):
    """Where keys and values live, and which layout a step has because of it.

    A cache that is a class of transformers derives from `TransformersCache`.
    """

    kind: ClassVar[str] = "cache"
    bound: ClassVar[tuple[type, ...]] = (KVCache, PaddedCache)
    capabilities: ClassVar[CacheCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare `requirements` with `capabilities`; extend it for what those cannot express.

        Args:
            requirements: The job, with what compiler, quantizer and decoding imply.
            options: An instance of `options`.

        Returns:
            Reasons against it; an empty list accepts.
        """
        del options
        return self.capabilities.lacks(requirements)

    def impossible(self, requirements: Requirements) -> list[str]:
        """Why no cache of this layout can have this model, whatever `refuse` says.

        Packed caches get no model with an attention or a mask of its own, a prefix that is read in
        both directions, chunked layers, layers that share keys and values, or layers on several
        devices. Of linear-attention layers the engine keeps the states itself, beside any of them.
        A backend need not write anything for it.

        Args:
            requirements: The job.
        """
        packed = self.capabilities.layout == "packed"
        if packed:
            return not_packed(requirements)
        return not_fixed(requirements) if self.capabilities.static_shapes else []

    def request_bytes(self, requirements: Requirements, options: Any, tokens: int) -> int | None:
        """The most that a request of `tokens` tokens holds, in bytes; None: unknown.

        `jackfield.plan` computes from this, and the three below, how much fits. None of them is
        checked against what is held: a wrong number is a wrong forecast.

        Args:
            requirements: The job.
            options: An instance of `options`.
            tokens: Prompt and new ones.

        Returns:
            By default the keys and values of the layers, without padding.
        """
        del options
        return (
            kv_bytes(requirements, tokens) if known(requirements, requirements.kv_numbers) else None
        )

    def pool_bytes(self, requirements: Requirements, options: Any) -> int | None:
        """The memory that requests share, in bytes, where `options` fix it; None: what is free.

        Args:
            requirements: The job.
            options: An instance of `options`.
        """
        del requirements, options
        return None

    def pool_of(self, requirements: Requirements, options: Any, left: int) -> int | None:
        """What `bind` allocates, in bytes; None: it takes memory as it is needed.

        Args:
            requirements: The job.
            options: An instance of `options`.
            left: Bytes that are free beside the weights and a step.
        """
        del left
        return self.pool_bytes(requirements, options)

    def allocated_bytes(
        self, requirements: Requirements, options: Any, tokens: int, requests: int
    ) -> int | None:
        """The bytes that are allocated once `requests` requests of `tokens` tokens run.

        More than they hold, where there is a pool or memory is taken in large pieces.

        Args:
            requirements: The job.
            options: An instance of `options`.
            tokens: Prompt and new ones of each.
            requests: How many run.

        Returns:
            By default `pool_bytes`, or what they hold; None: unknown.
        """
        if (pool := self.pool_bytes(requirements, options)) is not None:
            return pool
        held = self.request_bytes(requirements, options, tokens)
        return None if held is None else requests * held

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """The layout, which the attention must serve.

        Args:
            requirements: The job.
            options: An instance of `options`.
        """
        del options
        return replace(requirements, layout=self.capabilities.layout)

    @abstractmethod
    def bind(self, context: BindContext) -> KVCache | PaddedCache:
        """Return an empty cache for one model. Called once a model, when its weights are there.

        It may allocate its pools now, and leaves `context.step_bytes` free for steps.

        Args:
            context: `model` on its devices; `requirements.windows` and `packed_shapes` say what
                each layer keeps.

        Returns:
            A `KVCache` of the layout that `capabilities` name (`PackedKVCache` for "packed"), or a
            `PaddedCache`, whose rows the engine lays out.

        Raises:
            CacheFullError: There is too little memory; say how much, and which option helps.
        """

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), CacheCapabilities):
            found.append("`capabilities` must be a CacheCapabilities")
        return found


def not_fixed(requirements: Requirements) -> list[str]:
    """Why no cache can show a model columns that are not written yet; empty: one may."""
    if requirements.fixed is None:
        return []
    return [f"shows a model columns that are not written yet ({requirements.fixed})"]


class TransformersCache(Cache):
    """A cache of the padded layout that is one of transformers' own classes.

    A backend is its capabilities and `make`; the engine lays the rows out. `jackfield.cache` hands
    the same object to plain transformers code. Rows that finish are taken out with the object's
    `reorder_cache`; where `capabilities.static_shapes`, they stay where they are and idle. Rejected
    drafts are taken back with `crop`.

    Attributes:
        plain_tensors: Layers keep keys and values as tensors, whose bytes can be counted; False
            where they are packed, so that the bytes of running requests are unknown.
    """

    bound: ClassVar[tuple[type, ...]] = (PaddedCache,)
    plain_tensors: ClassVar[bool] = True

    @abstractmethod
    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        """Make an empty cache for one batch. Called when the first step of a batch is laid out.

        Lives: until the last row of the batch has ended, or has joined another batch; then it is
        dropped.

        Violations: PluginError for anything but a `transformers.Cache`. In caches that are not
        jackfield's own, what `update` returns is held to shape, dtype, device and length.

        Args:
            context: As for `bind`.
            length: How many columns the batch has at most. None in plain transformers code, where
                it is not known yet; a cache that needs it raises UsageError.
        """

    def max_cache_len(self, options: Any) -> int | None:
        """How many columns every batch has at most; None: any number.

        Args:
            options: An instance of `options`.
        """
        del options
        return None

    def bind(self, context: BindContext) -> PaddedCache:
        """What `make` and `max_cache_len` say; there is nothing to override.

        Args:
            context: As for every cache.
        """
        return PaddedCache(
            lambda length: self.make(context, length),
            max_cache_len=self.max_cache_len(context.options),
            static_shapes=self.capabilities.static_shapes,
            plain_tensors=self.plain_tensors,
        )
