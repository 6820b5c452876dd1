"""Whether Triton runs its kernels in Python, as it does on request where there is no GPU."""

from __future__ import annotations

import os


def interpreting() -> bool:
    """What `TRITON_INTERPRET` says; Triton reads it when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
