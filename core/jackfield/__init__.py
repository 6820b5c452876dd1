"""Plug any attention, KV cache, quantizer or decoding strategy into any transformers model.

Importing this module loads neither torch nor transformers; the names below are loaded when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jackfield import quieting
from jackfield.hookspecs import hookimpl

if TYPE_CHECKING:
    __version__: str
    from jackfield.bridge.cache import cache
    from jackfield.bridge.generation import decoding
    from jackfield.bridge.install import install, report, uninstall
    from jackfield.bridge.quantization import quantization
    from jackfield.choosing.planning import Plan
    from jackfield.errors import JackfieldError
    from jackfield.figures.estimating import Estimate, estimate
    from jackfield.front import load, plan
    from jackfield.running.engine import Engine
    from jackfield.running.requests import Request
    from jackfield.running.sequences import Completion, Delta

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Estimate",
    "JackfieldError",
    "Plan",
    "Request",
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
    "Completion": "jackfield.running.sequences",
    "Delta": "jackfield.running.sequences",
    "Engine": "jackfield.running.engine",
    "Estimate": "jackfield.figures.estimating",
    "JackfieldError": "jackfield.errors",
    "Plan": "jackfield.choosing.planning",
    "Request": "jackfield.running.requests",
    "cache": "jackfield.bridge.cache",
    "decoding": "jackfield.bridge.generation",
    "estimate": "jackfield.figures.estimating",
    "install": "jackfield.bridge.install",
    "load": "jackfield.front",
    "plan": "jackfield.front",
    "quantization": "jackfield.bridge.quantization",
    "report": "jackfield.bridge.install",
    "uninstall": "jackfield.bridge.install",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("jackfield")
        globals()[name] = value
        return value
    if name not in _HOMES:
        raise AttributeError(f"module 'jackfield' has no attribute {name!r}")
    with quieting.quieted(*quieting.TORCHAO):  # torchao comes in with transformers
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "__version__"})
