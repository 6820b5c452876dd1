"""Plug any attention, KV cache, quantizer or decoding strategy into any transformers model.

Importing this module loads neither torch nor transformers; the names below are loaded when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jackfield import errors, paths, quieting
from jackfield.hookspecs import hookimpl

if TYPE_CHECKING:
    __version__: str
    from jackfield.api import load, plan
    from jackfield.engine.completions import Completion, Delta
    from jackfield.engine.engine import Engine
    from jackfield.engine.requests import Request
    from jackfield.errors import JackfieldError
    from jackfield.estimates.estimate import Estimate
    from jackfield.estimates.estimating import estimate
    from jackfield.in_transformers.attention import install, report, uninstall
    from jackfield.in_transformers.cache import cache
    from jackfield.in_transformers.decoding import decoding
    from jackfield.in_transformers.quantization import quantization
    from jackfield.planning.planning import Plan
    from jackfield.tracing.trace import Trace

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Estimate",
    "JackfieldError",
    "Plan",
    "Request",
    "Trace",
    "cache",
    "decoding",
    "estimate",
    "hookimpl",
    "install",
    "load",
    "plan",
    "quantization",
    "report",
    "uninstall",
]

_HOMES = {
    "Completion": "jackfield.engine.completions",
    "Delta": "jackfield.engine.completions",
    "Engine": "jackfield.engine.engine",
    "Estimate": "jackfield.estimates.estimating",
    "JackfieldError": "jackfield.errors",
    "Plan": "jackfield.planning.planning",
    "Request": "jackfield.engine.requests",
    "Trace": "jackfield.tracing.trace",
    "cache": "jackfield.in_transformers.cache",
    "decoding": "jackfield.in_transformers.decoding",
    "estimate": "jackfield.estimates.estimating",
    "install": "jackfield.in_transformers.attention",
    "load": "jackfield.api",
    "plan": "jackfield.api",
    "quantization": "jackfield.in_transformers.quantization",
    "report": "jackfield.in_transformers.attention",
    "uninstall": "jackfield.in_transformers.attention",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("jackfield")
        globals()[name] = value
        return value
    if name not in _HOMES:
        from jackfield.requests.other_engines import no_attribute

        raise no_attribute("module 'jackfield'", name)
    paths.check_here()
    with quieting.quieted(*quieting.TORCHAO):  # torchao comes in with transformers
        try:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        except (OSError, ImportError, RecursionError) as error:
            raise errors.unusable_folder(error) or error from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "__version__"})
