"""Whether Triton can run here; where there is no GPU it runs its kernels in Python, on request."""

from __future__ import annotations

import importlib.util
import os


def interpreting() -> bool:
    """What `TRITON_INTERPRET` says; Triton reads it when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def without_triton() -> list[str]:
    """Why no kernel of Triton runs on this machine; none: it does. Imports torch."""
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed: pip install 'jackfield[triton]'"]
    import torch

    if torch.cuda.is_available() or interpreting():
        return []
    interpret = "set TRITON_INTERPRET=1 before Python starts"
    return [f"there is no CUDA GPU; to run its kernels slowly on the CPU, {interpret}"]
