"""What is there: all that a kernel, a compiler or a backend could stumble over."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from gpucheck.bandwidth import copied
from gpucheck.bench import Bench
from gpucheck.metadata import missing
from gpucheck.results import SkippedError, Values

#: Functions whose parameters decide what a backend can do.
SIGNATURES = (
    "torch.nn.attention.varlen:varlen_attn",
    "torch.nn.attention:sdpa_kernel",
    "flash_attn:flash_attn_varlen_func",
    "flash_attn_interface:flash_attn_varlen_func",
    "transformers:ContinuousBatchingConfig",
    "transformers:CompileConfig",
)
COMPILERS = ("gcc", "g++", "nvcc", "ptxas", "ninja")


def run(bench: Bench) -> None:
    results = bench.results
    with results.check("host") as found:
        found.update(
            python=sys.version.split()[0], system=platform.platform(), cores=os.cpu_count()
        )
    with results.check("gpu") as found:
        _gpu(bench, found)
    with results.check("libraries") as found:
        for name in ("torch", "triton", "transformers", "accelerate", "safetensors", "tokenizers"):
            found[name] = version_of(name)
        found["cuda"] = torch.version.cuda
    for group, names in missing().items():
        results.note(f"needed by {group}", None if names else True, missing=", ".join(names))
    for name in COMPILERS:
        with results.check(f"compiler {name}") as found:
            found["version"] = _compiler(name)
    with results.check("Python headers") as found:
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if not header.exists():
            raise SkippedError(f"no {header}: Triton cannot build its launcher without it")
        found["at"] = str(header)
    with results.check("kernels behind sdpa") as found:
        _sdpa(bench, found)
    for name in SIGNATURES:
        with results.check(f"signature {name}") as found:
            found["found"] = signature_of(name)
    with results.check("plugins") as found:
        _plugins(found)
    with results.check("bandwidth") as found:
        found["measured"] = copied(bench)
        found["peak"] = bench.device.peak_bandwidth()


def _gpu(bench: Bench, found: Values) -> None:
    found["name"] = bench.device.model
    if bench.device.name == "cpu":
        raise SkippedError("no GPU")
    about = torch.cuda.get_device_properties(bench.device.name)
    found.update(
        capability=f"{about.major}.{about.minor}",
        memory=about.total_memory,
        multiprocessors=about.multi_processor_count,
        devices=torch.cuda.device_count(),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    )


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not there"


def _compiler(name: str) -> str:
    if shutil.which(name) is None:
        raise SkippedError("not there")
    return _output(name, "--version")


def _output(*command: str) -> str:
    """The first line with a digit that a program prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.strip() for line in lines if any(map(str.isdigit, line))), "")


def _sdpa(bench: Bench, found: Values) -> None:
    one = torch.zeros(1, 1, 1, 8, device=bench.device.name)
    torch.nn.functional.scaled_dot_product_attention(one, one, one)  # when torch sets its order
    backends = torch.backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        found[name] = getattr(backends, f"{name}_sdp_enabled")()
    found["cudnn_version"] = torch.backends.cudnn.version()
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    found["order"] = None if order is None else list(order())


def signature_of(name: str) -> str:
    module, _, attribute = name.partition(":")
    try:
        return str(inspect.signature(getattr(importlib.import_module(module), attribute)))
    except (ImportError, AttributeError) as error:
        raise SkippedError(str(error).splitlines()[0]) from None


def _plugins(found: Values) -> None:
    from jackfield.registry.discovery import registry

    records = registry().plugins
    found["loaded"] = sum(record.state == "loaded" for record in records)
    failed = {r.entry_point: r.cause for r in records if r.state != "loaded"}
    found["ok"] = bool(records) and not failed
    if failed:
        found["failed"] = failed
