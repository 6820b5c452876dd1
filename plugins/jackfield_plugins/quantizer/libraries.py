"""The libraries that quantizers stand on: which are missing, and how to import the loud ones."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from jackfield.contracts import quieted


def missing(extra: str, *modules: str) -> list[str]:
    """What has to be installed for these modules; nothing is imported."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    verb = "is" if len(absent) == 1 else "are"
    return [f"{' and '.join(absent)} {verb} not installed: pip install 'jackfield[{extra}]'"]


def import_bitsandbytes() -> None:
    """Import it without the kernel that it fetches from the hub and runs where it may.

    On processors with AVX512-BF16, 0.50 does so at import, whatever revision is there, and logs
    a warning where it fails (`backends/cpu/ops.py`). It has the same product in its own library.
    """
    with quieted("bitsandbytes"), _without_kernels():
        importlib.import_module("bitsandbytes")


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Make `import kernels` fail for a while."""
    before = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # how import is told of none
    try:
        yield
    finally:
        if before is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = before
