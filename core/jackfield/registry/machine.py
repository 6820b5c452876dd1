"""A machine's devices and compilers. Nothing but `devices` imports torch."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from jackfield.registry.findings import Finding


def devices() -> Iterator[Finding]:
    """What torch can compute on."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries does not load
        message = f"torch cannot be imported: {error}"
        advice = "install it as https://pytorch.org/get-started says for this machine"
        yield Finding("devices", "torch", "problem", message, advice)
        return
    yield Finding("devices", "cpu", "ok", ", ".join(_cpu(torch)))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield Finding("devices", f"cuda:{index}", "ok", _cuda(torch, index))
    elif Path("/proc/driver/nvidia/version").exists():
        message = f"this machine has an NVIDIA driver, but torch {torch.__version__} sees no device"
        advice = "install a CUDA build of torch that fits the driver; see `nvidia-smi`"
        yield Finding("devices", "cuda", "warning", message, advice)
    if torch.backends.mps.is_available():
        yield Finding("devices", "mps", "ok", platform.processor() or "Apple")


def _cpu(torch: Any) -> Iterator[str]:
    yield platform.machine()
    yield torch.backends.cpu.get_cpu_capability()
    if any(v for k, v in _capabilities(torch).items() if k.startswith("amx")):
        yield "AMX"
    yield f"{torch.get_num_threads()} threads"


def _capabilities(torch: Any) -> Mapping[str, Any]:
    known = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.11 has no such function
    result: Mapping[str, Any] = known()
    return result


def _cuda(torch: Any, index: int) -> str:
    facts = torch.cuda.get_device_properties(index)
    memory = facts.total_memory / 2**30
    return f"{facts.name}, {memory:.0f} GiB, compute capability {facts.major}.{facts.minor}"


def compilers(installed: Mapping[str, Distribution], *, gpu: bool) -> Iterator[Finding]:
    """What torch.compile and Triton need on this machine."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None or shutil.which(compiler) is None:
        message = f"not found{f': CXX={compiler}' if compiler else ''}; torch.compile needs one"
        yield Finding("compilers", "C++", "warning", message, "install g++ or clang++, or set CXX")
    else:
        yield Finding("compilers", "C++", "ok", str(shutil.which(compiler)))
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        message = f"{header} is missing; torch.compile and Triton need it"
        advice = "install the development files of this Python (python3-dev or python3-devel)"
        yield Finding("compilers", "Python.h", "warning", message, advice)
    if "triton" in installed:
        yield Finding("compilers", "triton", "ok", installed["triton"].version)
    elif gpu:
        message = "is not installed; torch.compile on a GPU and every Triton kernel need it"
        advice = "run `pip install triton`, in the version that this torch requires"
        yield Finding("compilers", "triton", "warning", message, advice)
