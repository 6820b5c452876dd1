"""The kernel of `cpu_decode`."""

from __future__ import annotations

from pathlib import Path

from jackfield_plugins.native import NativeKernel

KERNEL = NativeKernel("cpu_decode", Path(__file__).parent, instead="'sdpa'")
