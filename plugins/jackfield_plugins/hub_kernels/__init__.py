"""Kernels from the Hugging Face Hub: whose they are, which bytes they are, whether they run.

Nothing of a kernel is executed in this process before its publisher is trusted, its content is
what the lock file says, and a process of its own has run it.
"""

from __future__ import annotations


class KernelRefused(Exception):  # noqa: N818 - a reason, not a failure
    """Why a kernel is not used; its text is a reason for a plan."""
