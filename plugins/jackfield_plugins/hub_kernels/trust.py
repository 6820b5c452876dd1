"""Whose kernels may run: a kernel is code that runs as its user."""

from __future__ import annotations

import os

from jackfield_plugins.hub_kernels import KernelRefused

VARIABLE = "JACKFIELD_TRUSTED_PUBLISHERS"
BUILT_IN = frozenset({"kernels-community"})


def check_publisher(repo: str) -> None:
    """Raise KernelRefused unless the organisation that owns `repo` is trusted.

    Asked for local folders and offline as well, where the `kernels` package asks nobody.
    """
    publisher = repo.partition("/")[0]
    named = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
    if publisher not in BUILT_IN | named:
        raise KernelRefused(
            f"its publisher {publisher!r} is not trusted; a kernel is code that runs as you: if "
            f"you trust it, set {VARIABLE}={publisher} (several with commas between)"
        )
