"""Which cache of ours lays out the rows of a backend that leaves that to the engine."""

from __future__ import annotations

from jackfield.bridge.joined_rows import can_join
from jackfield.contracts import BindContext, KVCache, PaddedCache
from jackfield.engine.joining import JoiningKVCache
from jackfield.engine.padded import PaddedKVCache


def laid_out(bound: KVCache | PaddedCache, context: BindContext) -> KVCache:
    """The cache that a backend bound, with its rows laid out where that is left to the engine."""
    if not isinstance(bound, PaddedCache):
        return bound
    layout = JoiningKVCache if _join(bound, context) else PaddedKVCache
    return layout(bound, context)


def _join(bound: PaddedCache, context: BindContext) -> bool:
    """Whether rows may join others that run: behind an encoder, where a trial showed it right.

    Decoders alone have `paged` for that, with no padding at all.
    """
    needs = context.requirements
    fixed = bound.static_shapes or bound.max_cache_len is not None or not bound.plain_tensors
    if needs.encoder is None or needs.ragged is not None or fixed:
        return False
    return can_join(bound.make(1))
