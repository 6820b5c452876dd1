"""``quantized``: transformers' `QuantizedCache`. Lossy: fewer bits for each key and value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    Cache,
    CacheCapabilities,
    Requirements,
    TransformersCache,
)

if TYPE_CHECKING:
    import transformers

#: backend -> the numbers of bits that it can store (hqq unpacks 3 for matrices only)
BITS = {"quanto": (2, 4), "hqq": (1, 2, 4, 8), "fp8": (8,)}

#: backend -> along which axis of the flattened states a group runs: the one in memory order, so
#: that it stays inside one head of one token
AXIS = {"quanto": 0, "hqq": 1}

GROUP_SIZE = 64


@dataclass(frozen=True)
class QuantizedOptions:
    """`backend` is the library that stores the states; fp8 is part of transformers.

    Keys and values of `nbits` (4) in groups of `q_group_size` (64) numbers with a scale each; the
    last `residual_length` (128) tokens are stored as they are. fp8 has none of these: one scale
    for a whole layer and batch, taken from the first tokens that are fed, so that a request's text
    can depend on its neighbours.
    """

    backend: Literal["quanto", "hqq", "fp8"] = "quanto"
    nbits: Literal[1, 2, 4, 8] | None = None
    q_group_size: int | None = None
    residual_length: int | None = None

    def __post_init__(self) -> None:
        if self.nbits is not None and self.nbits not in BITS[self.backend]:
            known = ", ".join(map(str, BITS[self.backend]))
            raise ValueError(f"backend {self.backend} stores nbits={known}, not {self.nbits}")
        for name in ("q_group_size", "residual_length"):
            size = getattr(self, name)
            if size is not None and self.backend == "fp8":
                raise ValueError(f"backend fp8 has no {name}: it stores one scale a layer")
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")


class QuantizedCache(TransformersCache):
    """After KIVI (Liu et al. 2024, arXiv:2402.02750), as far as transformers follows it.

    Groups must divide the heads: otherwise one would run over tokens and rows, and a request's
    text would depend on who is in its batch. float64 is refused because states pass through
    float32 on their way.
    """

    name = "quantized"
    options = QuantizedOptions
    plain_tensors = False
    capabilities = CacheCapabilities(
        layout="padded",
        layer_types=frozenset({"full_attention"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
    )

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if missing := _missing(options.backend):
            reasons.append(missing)
        if options.backend != "fp8":
            reasons += _misfits(requirements, options)
        return reasons

    def request_bytes(self, requirements: Requirements, options: Any, tokens: int) -> int | None:
        return None  # each library packs in its own way

    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        from transformers import QuantizedCache

        options = context.options
        asked: dict[str, int | None] = {}
        if options.backend != "fp8":
            axis = AXIS[options.backend]
            asked = {
                "nbits": options.nbits,
                "q_group_size": options.q_group_size,
                "residual_length": options.residual_length,
                "axis_key": axis,
                "axis_value": axis,
            }
        given = {name: value for name, value in asked.items() if value is not None}
        return QuantizedCache(options.backend, context.config, **given)


def _misfits(requirements: Requirements, options: QuantizedOptions) -> list[str]:
    """Why keys and values do not fall into whole groups, and those into whole bytes."""
    size = options.q_group_size or GROUP_SIZE
    head = math.gcd(*requirements.head_dims)
    if head % size:
        better = math.gcd(head, size)
        return [f"groups of {size} do not divide heads of {head}; write 'q_group_size={better}'"]
    groups, nbits = requirements.num_key_value_heads * head // size, options.nbits or 4
    packed = 8 // nbits
    if options.backend == "hqq" and groups % packed:
        why = f"hqq packs {packed} groups of {nbits} bits into a byte, and a token has {groups}"
        return [f"{why} of {size}; use a smaller q_group_size or more nbits"]
    return []


def _missing(backend: str) -> str | None:
    """What has to be installed for `backend`, if anything."""
    from transformers import __version__, cache_utils
    from transformers.utils.import_utils import is_hqq_available, is_optimum_quanto_available

    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        # Before that one, rows that were taken out of a batch stayed in the quantized states.
        return (
            f"transformers {__version__} cannot take a finished row out of a quantized cache; "
            "pip install -U transformers"
        )
    there = {"quanto": is_optimum_quanto_available, "hqq": is_hqq_available, "fp8": lambda: True}
    if there[backend]():
        return None
    return f"backend {backend} is not installed: pip install 'jackfield[{backend}]'"


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [QuantizedCache()]
