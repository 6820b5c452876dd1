"""One hook for each kind. A plugin module implements those it has something to offer for.

Hooks are called once, when backends are collected, never while tokens are made. Implementations
return instances, so that a module is imported in milliseconds and heavy libraries come in with
``bind``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from jackfield.contracts import (
        Attention,
        Cache,
        Compiler,
        Decoding,
        Kernel,
        Quantizer,
        Scheduler,
    )

hookspec = pluggy.HookspecMarker("jackfield")
hookimpl = pluggy.HookimplMarker("jackfield")

#: kind -> name of the hook that offers it
HOOKS = {
    "attention": "jackfield_attention",
    "cache": "jackfield_cache",
    "compiler": "jackfield_compiler",
    "decoding": "jackfield_decoding",
    "kernel": "jackfield_kernel",
    "quantizer": "jackfield_quantizer",
    "scheduler": "jackfield_scheduler",
}


@hookspec
def jackfield_attention() -> Sequence[Attention]:  # type: ignore[empty-body]
    """Offer backends that compute how a layer attends."""


@hookspec
def jackfield_cache() -> Sequence[Cache]:  # type: ignore[empty-body]
    """Offer backends that hold keys and values, and with them the layout of a step."""


@hookspec
def jackfield_compiler() -> Sequence[Compiler]:  # type: ignore[empty-body]
    """Offer backends that decide how a step is executed."""


@hookspec
def jackfield_decoding() -> Sequence[Decoding]:  # type: ignore[empty-body]
    """Offer backends that decide which tokens come next."""


@hookspec
def jackfield_kernel() -> Sequence[Kernel]:  # type: ignore[empty-body]
    """Offer backends that compute a layer in place of the model's own code."""


@hookspec
def jackfield_quantizer() -> Sequence[Quantizer]:  # type: ignore[empty-body]
    """Offer backends that decide how weights are stored."""


@hookspec
def jackfield_scheduler() -> Sequence[Scheduler]:  # type: ignore[empty-body]
    """Offer backends that decide who computes how many tokens in a step."""
