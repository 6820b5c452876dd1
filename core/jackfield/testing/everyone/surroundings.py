"""What belongs to the process and not to a backend: whether it is left as it was."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch

from jackfield.testing.checks import WrongError


@contextlib.contextmanager
def kept(what: str) -> Iterator[None]:
    """Raise WrongError that names what of the process `what` has changed, which is put back."""
    before = _state()
    try:
        yield
    finally:
        now = _state()
        changed = [name for name, value in before.items() if now[name] != value]
        torch.set_default_dtype(before["torch's default dtype"])
        os.chdir(before["the working directory"])
    if changed:
        raise WrongError(f"{what} changed {', '.join(changed)}, which belongs to the process")


def _state() -> dict[str, Any]:
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's random numbers (torch.manual_seed)": torch.get_rng_state().numpy().tobytes(),
        "the gradient mode": torch.is_grad_enabled(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "random numbers of Python (random.seed)": hash(random.getstate()),
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.stdout": sys.stdout,
        "the recursion limit": sys.getrecursionlimit(),
        "handlers of the root logger": list(logging.getLogger().handlers),
        "the level of the root logger": logging.getLogger().level,
        "what SIGINT does": signal.getsignal(signal.SIGINT),
    }
