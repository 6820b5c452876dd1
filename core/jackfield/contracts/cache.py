"""The cache kind: where keys and values live, and which layout a step has because of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, unknown
from jackfield.contracts.packed import PACKED_LAYER_TYPES, PackedLayer, not_packed
from jackfield.contracts.requirements import DTYPES, LAYOUTS, Requirements
from jackfield.contracts.sequences import Sequence, Step
from jackfield.contracts.sizes import known, kv_bytes

if TYPE_CHECKING:
    import torch
    import transformers


LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True, kw_only=True)
class CacheCapabilities:
    """What a cache backend declares it can do. What is not declared is not had.

    `rollback`: the layer types whose tokens can be taken back once they were fed (rejected drafts).
    `static_shapes`: buffers keep their address and shape from step to step. `compiles`: keys and
    values may be given to it by a compiled step, outside of the model's code: in the packed layout
    through `write`, in the padded one through the `update` of the `past_key_values` it prepared.
    `forks`: a sequence can go on as a copy of another (`KVCache.fork`).
    """

    layout: str
    layer_types: frozenset[str]
    dtypes: frozenset[str] = frozenset(DTYPES)
    rollback: frozenset[str] = frozenset()
    static_shapes: bool = False
    compiles: bool = False
    forks: bool = False

    def __post_init__(self) -> None:
        unknown({self.layout}, LAYOUTS, "layout")
        unknown(self.layer_types, LAYER_TYPES, "layer type")
        if self.layout == "packed":
            unknown(self.layer_types, PACKED_LAYER_TYPES, "layer type of the packed layout")
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.rollback, self.layer_types, "layer type to roll back")
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
        if requirements.batch_invariant and self.layout != "packed":
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
        stuck = sorted(set(requirements.layer_types) & self.layer_types - self.rollback)
        if stuck:
            return f"cannot take back tokens of {', '.join(stuck)} layers (rollback)"
        wrong = requirements.pieces or requirements.holes
        if wrong and self.layout == "padded":
            return f"cannot take back tokens (rollback) of this model ({wrong})"
        return None


@dataclass(frozen=True)
class ModelInputs:
    """The keyword arguments of one forward call; valid until the next `prepare`.

    The model's logits become `[rows, k, vocab]`, one row per feed of the step, where the last `k`
    positions of row i line up with the last `k` tokens of feed i. Where some rows are nobody's,
    `feeds` (int64 `[feeds]`) says which row is that of feed i. `decode`: every sequence feeds one
    token and its drafts.
    """

    kwargs: dict[str, Any]
    rows: int
    feeds: torch.Tensor | None = None
    decode: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """What a cache holds now, and what it has done since it was made.

    `pages_used` are held by running sequences, `pages_kept` only by the hope that a later prompt
    begins alike; the rest of `pages` is free. `prefix_tokens` of all `prompt_tokens` that entered
    were there already. `swapped`: sequences that were evicted and wait in host memory. `num_bytes`
    is the memory of the pools.
    """

    pages: int
    pages_used: int
    pages_kept: int
    page_size: int
    prompt_tokens: int
    prefix_tokens: int
    swapped: int
    num_bytes: int


class KVCache(ABC):
    """The keys and values of the running sequences, bound to one model.

    A sequence enters with `admit`. Then, once a step: `portions`, `fits`, `prepare`, `commit`;
    `evict` and `release` in between.

    `joins`: sequences enter and are left out of steps at any time; otherwise they enter together
    and each takes part in every step. `max_portion` is how many tokens of a sequence a step feeds
    at most, None: all; the loop sets it.
    """

    joins: ClassVar[bool] = False
    max_portion: int | None = None

    @abstractmethod
    def admit(self, sequence: Sequence) -> bool:
        """Take in a sequence, if what it has so far fits beside the others; it does where none are.

        Sets `num_cached` to how many of its tokens are there already.
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

    def fits(self, step: Step) -> bool:
        """Whether there is memory for `step`; where there is not, the loop evicts."""
        del step
        return True

    def evict(self, sequence: Sequence) -> None:
        """Give a running sequence's memory back; `admit` may take it in again later."""
        self.release([sequence])
        sequence.num_cached = 0

    def rewind(self, sequence: Sequence, tokens: int) -> None:
        """Take back all but the first `tokens` cached tokens, in whatever steps they were fed.

        Sets `num_cached`, to 0 where it forgets the whole sequence, as it does by default; then it
        has to be admitted again. Asked for where the cache belongs to a draft model.
        """
        del tokens
        self.evict(sequence)

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        """Forget `dropped`; then the second of each pair begins with what is cached of the first.

        Sets `num_cached` of those. A sequence may be dropped and be the second of a pair, which
        none is that goes on. In a cache that does not `joins`, rows that stay keep their order,
        and the new ones come behind them in the order of `copies`. Called after `commit`, where
        the backend declares `forks`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not fork")

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        """Why a request of this size can never be held, and which option would; None: it can be.

        Asked when a request is made, before anything is computed. The last new token is not fed,
        so `prompt_length + max_new_tokens - 1` tokens are cached, of each of its `copies` (more
        than 1 only where the backend declares `forks`).
        """
        del prompt_length, max_new_tokens, copies
        return None

    def portions(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        """How many tokens each of the running `sequences` feeds, at most `max(wanted)`.

        0 only where a sequence waits for others; a cache that `joins` takes what is wanted.
        """
        del sequences
        return wanted

    def held_bytes(self) -> int | None:
        """The memory of the keys and values of running sequences, as it is allocated.

        None where nobody can tell. Pages count whole; pages that nobody holds do not.
        """
        return None

    def forget(self) -> None:
        """Drop what is kept of sequences that have left: the model computes something else now.

        Called while it holds no sequence (an adapter is switched on or off).
        """
        return

    def usage(self) -> CacheUsage | None:
        """What it holds; None where that has no meaning of its own."""
        return None

    def close(self) -> None:
        """Let go of all memory: the engine is closed, and somebody may still have it.

        Called once, after its last sequence was released; afterwards only `usage`.
        """
        return


class PackedKVCache(KVCache):
    """A cache of the packed layout: it stores keys and values itself, for the attention to read.

    `page_size` is in tokens; None: not known before the first step.
    """

    joins: ClassVar[bool] = True
    page_size: int | None = None

    @abstractmethod
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        """Store this step's `[tokens, kv_heads, head_dim]` of one layer; returns what to read.

        Called once a layer, between `prepare` and `commit`.
        """


@dataclass(frozen=True)
class PaddedCache:
    """One of transformers' caches for each batch of rows; the engine lays the rows out.

    `make(length)` returns an empty cache for a batch that has at most `length` columns; None: not
    known. No batch has more than `max_cache_len` columns. `static_shapes`: buffers keep their
    address and shape while a batch runs.
    """

    make: Callable[[int | None], transformers.Cache]
    max_cache_len: int | None = None
    static_shapes: bool = False


class Cache(Backend):
    """Where K and V live. `bind` is called once per model."""

    kind: ClassVar[str] = "cache"
    bound: ClassVar[tuple[type, ...]] = (KVCache, PaddedCache)
    capabilities: ClassVar[CacheCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare `requirements` with `capabilities`; extend it for what those cannot express."""
        del options
        return self.capabilities.lacks(requirements)

    def impossible(self, requirements: Requirements) -> list[str]:
        packed = self.capabilities.layout == "packed"
        if packed:
            return not_packed(requirements)
        return not_fixed(requirements) if self.capabilities.static_shapes else []

    def request_bytes(self, requirements: Requirements, options: Any, tokens: int) -> int | None:
        """What a request of `tokens` tokens holds at most, in bytes; None: nobody can tell."""

        del options
        return kv_bytes(requirements, tokens) if known(requirements.kv_numbers) else None

    def pool_bytes(self, requirements: Requirements, options: Any) -> int | None:
        """The memory that requests share, where `options` fix it; None: what is free."""
        del requirements, options
        return None

    def pool_of(self, requirements: Requirements, options: Any, left: int) -> int | None:
        """What `bind` allocates where `left` bytes are free beside weights and a step, in bytes.

        None: it takes memory as it is needed.
        """
        del left
        return self.pool_bytes(requirements, options)

    def allocated_bytes(
        self, requirements: Requirements, options: Any, tokens: int, requests: int
    ) -> int | None:
        """What is allocated once `requests` requests of `tokens` tokens run; None: unknown.

        More than they hold, where there is a pool or memory is taken in large pieces.
        """
        if (pool := self.pool_bytes(requirements, options)) is not None:
            return pool
        held = self.request_bytes(requirements, options, tokens)
        return None if held is None else requests * held

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        del options
        return replace(requirements, layout=self.capabilities.layout)

    @abstractmethod
    def bind(self, context: BindContext) -> KVCache | PaddedCache:
        """Return an empty cache for `context.model`."""

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

    A backend is its capabilities and `make`. `jackfield.cache` hands the same object to plain
    transformers code. Where `capabilities.static_shapes`, rows that finish stay where they are
    and idle; otherwise they are taken out with `transformers.Cache.reorder_cache`.
    """

    bound: ClassVar[tuple[type, ...]] = (PaddedCache,)

    @abstractmethod
    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        """An empty cache for one batch that has at most `length` columns.

        `length` is None in plain transformers code, where nobody knows it yet.
        """

    def max_cache_len(self, options: Any) -> int | None:
        """How many columns every batch has at most, because of `options`; None: any number."""
        del options
        return None

    def bind(self, context: BindContext) -> PaddedCache:
        return PaddedCache(
            lambda length: self.make(context, length),
            max_cache_len=self.max_cache_len(context.options),
            static_shapes=self.capabilities.static_shapes,
        )
