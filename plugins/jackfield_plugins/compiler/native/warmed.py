"""Which models were warmed on this machine: `auto` may take `native` for them."""

from __future__ import annotations

import contextlib
import hashlib
from importlib.metadata import version
from pathlib import Path

from jackfield.contracts import Requirements
from jackfield_plugins.native.keeping import KeepingError, cache_root, keep, kept, own_folder

#: What tells one model from another before there is one.
_TELLING = (
    "architecture", "dtype", "num_attention_heads", "num_key_value_heads", "head_dims",
    "layer_types", "windows", "token_numbers", "kv_numbers", "features", "weight_bytes", "head",
    "tied_head", "context_length", "stored",
)  # fmt: skip


def mark(requirements: Requirements) -> None:
    """Note that a model's graphs are on disk. Raises KeepingError where nothing can be kept."""
    path = _path(requirements)
    own_folder(path.parent)
    try:
        keep(path, b"")
    except OSError as error:
        raise KeepingError(f"{path} cannot be written ({error.strerror})") from None


def is_marked(requirements: Requirements) -> bool:
    """Whether that was noted, with these versions of the libraries."""
    with contextlib.suppress(KeepingError, OSError):
        return kept(_path(requirements)) == b""
    return False


def _path(requirements: Requirements) -> Path:
    told = [repr(getattr(requirements, name)) for name in _TELLING]
    told += [version(name) for name in ("torch", "transformers", "jackfield")]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:24]
    return cache_root() / "native-graphs" / f"{key}.warm"
