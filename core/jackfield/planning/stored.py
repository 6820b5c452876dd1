"""Checks what a checkpoint declares about its own quantization, before anything is decided.

Its values come from a file, so a wrong one is the file's fault and never that of a plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.bridge.patterns import check_patterns
from jackfield.bridge.source import ModelSource
from jackfield.contracts import Requirements
from jackfield.contracts.checkpoint import shown
from jackfield.errors import CheckpointError, PluginError
from jackfield.registry.backends import Registered, Registry

#: Fields of a quantization_config that hold texts to read, and no names of modules.
_TEXTS = ("dataset", "tokenizer")


def check_stored(registry: Registry, source: ModelSource, needs: Requirements) -> None:
    """Raise CheckpointError where no quantizer reads what a checkpoint says of itself, or where
    those that do find a field of it odd.
    """
    stored = needs.stored
    if stored is None or source.live is not None:
        return
    where = f"the quantization_config in {source.origin}"
    method = stored.get("quant_method")
    readers = [r for r in registry.of_kind("quantizer") if _reads(r, stored)]
    if not readers:
        named = "names no quant_method" if method is None else f"has quant_method {_shown(method)}"
        raise CheckpointError(
            f"{where} {named}, which no quantizer here reads as it stands; it is never loaded as "
            "if it were not quantized"
        )
    strict = [reader for reader in readers if _has_fields(reader)]
    odd = [reader.ask("odd", needs) for reader in strict or readers]
    if all(odd):
        raise CheckpointError(f"{where}: {odd[0][0]}")
    patterns = {name: value for name, value in stored.items() if name not in _TEXTS}
    check_patterns(where, patterns, (weight.name for weight in needs.weights))


def _shown(method: Any) -> str:
    return shown(str(getattr(method, "value", method)))


def _has_fields(reader: Registered) -> bool:
    return bool(reader.backend.fields)  # type: ignore[attr-defined]  # of a Quantizer


def _reads(reader: Registered, stored: Mapping[str, Any]) -> bool:
    """One that fails has its own refusal later, by name."""
    try:
        return bool(reader.ask("reads", stored))
    except PluginError:
        return False
