"""What is installed and whether it fits together: findings, each with what to do about it.

Versions are read from installed metadata, the ranges from jackfield's own. Nothing but `devices`
imports torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from jackfield.registry.backends import PluginRecord, Registry
from jackfield.registry.discovery import GROUP, registry
from jackfield.spelling import nearest

DISTRIBUTION = "jackfield"

State = Literal["ok", "warning", "problem"]

#: Environment variables that jackfield reads.
VARIABLES = ("JACKFIELD_DISABLE", "JACKFIELD_LOAD_TIMEOUT", "JACKFIELD_PLUGINS")

#: Worth knowing the version of, when something is wrong, though not every plugin needs them.
NOTABLE = (
    "accelerate", "bitsandbytes", "gptqmodel", "huggingface-hub", "kernels", "numpy", "torchao",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `advice` says what to do, where there is something to do."""

    area: str
    subject: str
    state: State
    message: str
    advice: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def examine() -> list[Finding]:
    """Every finding about this process and its environment."""
    installed = list(importlib.metadata.distributions())
    found = registry()
    usable = list(devices())
    gpu = any(finding.subject.startswith("cuda:") for finding in usable)
    return [
        *plugins(found),
        *libraries(_first(installed)),
        *stale(installed, {record.distribution for record in found.plugins}),
        *variables(os.environ, found.warnings),
        *usable,
        *compilers(_first(installed), gpu=gpu),
    ]


def _first(installed: Iterable[Distribution]) -> dict[str, Distribution]:
    """Canonical name -> the distribution that an import would use: the first one on the path."""
    found: dict[str, Distribution] = {}
    for dist in installed:
        if name := _name(dist):
            found.setdefault(name, dist)
    return found


def _name(dist: Distribution) -> str | None:
    """None for a folder that an interrupted installation left without readable metadata."""
    try:
        headers = dist.metadata
        if "Name" not in headers or "Version" not in headers:  # [] differs between Pythons then
            return None
        return canonicalize_name(headers["Name"]) or None
    except (OSError, TypeError, ValueError):  # TypeError: there are no headers at all
        return None


def plugins(found: Registry) -> Iterator[Finding]:
    """One finding an entry point."""
    if not found.plugins:
        yield Finding(
            "plugins", GROUP, "problem", "no plugin is installed, not even the built-in ones",
            "reinstall with `pip install --force-reinstall --no-deps jackfield`",
        )  # fmt: skip
    for record in found.plugins:
        yield _plugin(record)


def _plugin(record: PluginRecord) -> Finding:
    subject = f"{record.entry_point} of {record.distribution} {record.version}"
    if record.state == "disabled":
        message, advice = f"disabled: {record.cause}", "change that variable to have it back"
        return Finding("plugins", subject, "warning", message, advice)
    if record.state == "failed":
        advice = (
            f"repair or upgrade {record.distribution}, uninstall it, or leave it out with "
            f"JACKFIELD_DISABLE={record.entry_point}"
        )
        return Finding("plugins", subject, "problem", f"failed: {record.cause}", advice)
    if record.problems:
        advice = (
            f"tell the authors of {record.distribution}, or leave it out with "
            f"JACKFIELD_DISABLE={record.entry_point}"
        )
        return Finding("plugins", subject, "warning", "; ".join(record.problems), advice)
    return Finding("plugins", subject, "ok", f"offers {', '.join(record.backends)}")


def libraries(installed: Mapping[str, Distribution]) -> Iterator[Finding]:
    """Installed versions against the ranges in jackfield's metadata."""
    own = installed.get(DISTRIBUTION)
    if own is None:
        yield Finding(
            "libraries", DISTRIBUTION, "problem", "is imported but not installed, so it has no "
            "plugins and no ranges to check", "run `pip install -e .` in its source tree",
        )  # fmt: skip
        return
    yield Finding("libraries", DISTRIBUTION, "ok", own.version)
    wanted = SpecifierSet(own.metadata["Requires-Python"] or "")
    yield _in_range("python", platform.python_version(), wanted, extra=False)
    needed, optional = _requirements(own)
    for name, specifier in sorted(needed.items()):
        yield _library(name, installed.get(name), specifier)
    for name in sorted({*optional, *NOTABLE} - set(needed)):
        if (dist := installed.get(name)) is not None:
            specifier = optional.get(name, SpecifierSet())
            finding = _in_range(name, dist.version, specifier, extra=True)
            if name in NOTABLE or finding.state != "ok":
                yield finding


def _requirements(own: Distribution) -> tuple[dict[str, SpecifierSet], dict[str, SpecifierSet]]:
    """What is required here, and what the extras add: canonical name -> versions."""
    needed: dict[str, SpecifierSet] = {}
    optional: dict[str, SpecifierSet] = {}
    extras = own.metadata.get_all("Provides-Extra") or []
    for text in own.requires or ():
        requirement = Requirement(text)
        name, marker = canonicalize_name(requirement.name), requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            needed[name] = needed.get(name, SpecifierSet()) & requirement.specifier
        elif any(marker.evaluate({"extra": extra}) for extra in extras):
            optional[name] = optional.get(name, SpecifierSet()) & requirement.specifier
    return needed, optional


def _library(name: str, dist: Distribution | None, specifier: SpecifierSet) -> Finding:
    if dist is None:
        advice = f"run `{_install(name, specifier)}`"
        return Finding("libraries", name, "problem", "is not installed", advice)
    return _in_range(name, dist.version, specifier, extra=False)


def _in_range(name: str, version: str, wanted: SpecifierSet, *, extra: bool) -> Finding:
    shown = f"{version} (supported: {wanted})" if wanted else version
    if _within(version, wanted):
        return Finding("libraries", name, "ok", shown)
    advice = (
        f"run jackfield with python {wanted}"
        if name == "python"
        else f"run `{_install(name, wanted)}`"
    )
    return Finding("libraries", name, "warning" if extra else "problem", shown, advice)


def _within(version: str, wanted: SpecifierSet) -> bool:
    """Also of what is no version: packaging up to 25 raises there."""
    try:
        return wanted.contains(version, prereleases=True)
    except InvalidVersion:
        return not wanted


def _install(name: str, wanted: SpecifierSet) -> str:
    return f"pip install '{name}{wanted}'" if wanted else f"pip install {name}"


def stale(installed: Iterable[Distribution], offering: set[str]) -> Iterator[Finding]:
    """Metadata that does not tell the truth: found twice, or older than an editable source tree.

    Looks at jackfield, at what it requires, and at the distributions that offer plugins.
    """
    installed = list(installed)
    first = _first(installed)
    own = {DISTRIBUTION, *map(canonicalize_name, offering)}
    needed = _requirements(first[DISTRIBUTION])[0] if DISTRIBUTION in first else {}
    for name in sorted({*own, *needed} & set(first)):
        places = {(_place(d), d.version): None for d in installed if _name(d) == name}
        if len(places) > 1:
            yield _twice(name, list(places))
    for name in sorted(own & set(first)):
        yield from _editable(name, first[name])


def _place(dist: Distribution) -> str:
    return os.path.realpath(str(dist.locate_file("")))


def _twice(name: str, places: list[tuple[str, str]]) -> Finding:
    message = "is installed more than once: " + ", ".join(f"{v} in {path}" for path, v in places)
    state: State = "problem" if len({version for _, version in places}) > 1 else "warning"
    advice = f"run `pip uninstall {name}` until it is gone, then install it once"
    return Finding("installation", name, state, message, advice)


def _editable(name: str, dist: Distribution) -> Iterator[Finding]:
    """Compare an editable installation with the pyproject.toml of its source tree."""
    tree = _source_tree(dist)
    if tree is None:
        return
    advice = f"run `pip install -e {tree}` again"
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, ValueError) as error:
        message = f"is editable, but {tree / 'pyproject.toml'} cannot be read: {error}"
        yield Finding("installation", name, "problem", message, advice)
        return
    differences = list(_differences(dist, project))
    for message in differences:
        yield Finding("installation", name, "problem", message, advice)
    if not differences:
        yield Finding("installation", name, "ok", f"editable, the same as its source tree {tree}")


def _source_tree(dist: Distribution) -> Path | None:
    try:
        data = json.loads(dist.read_text("direct_url.json") or "{}")
        if not data.get("dir_info", {}).get("editable"):
            return None
        return Path(url2pathname(urlsplit(data["url"]).path))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _differences(dist: Distribution, project: Mapping[str, Any]) -> Iterator[str]:
    version = project.get("version", dist.version)  # a dynamic version cannot be compared
    if version != dist.version:
        yield f"{dist.version} is installed, its source tree says {version}"
    written = project.get("entry-points", {}).get(GROUP, {})
    known = {e.name: e.value for e in dist.entry_points if e.group == GROUP}
    if missing := sorted(set(written) - set(known)):
        yield f"its source tree has entry points that are not installed: {', '.join(missing)}"
    if gone := sorted(set(known) - set(written)):
        yield f"installed entry points are gone from its source tree: {', '.join(gone)}"
    if moved := sorted(n for n in known if written.get(n, known[n]) != known[n]):
        yield f"installed entry points name another module in its source tree: {', '.join(moved)}"


def variables(environ: Mapping[str, str], warnings: Iterable[str]) -> Iterator[Finding]:
    """The JACKFIELD_ variables that are set, and what discovery warned of."""
    for name in sorted(environ):
        if name in VARIABLES:
            yield Finding("environment", name, "ok", f"is set to {environ[name]!r}")
        elif name.startswith("JACKFIELD_"):
            message = f"is set, but nothing reads it{nearest(name, VARIABLES)}"
            yield Finding("environment", name, "warning", message, "unset or rename it")
    for warning in warnings:
        subject = next((v for v in VARIABLES if warning.startswith(v)), None)
        if subject is None:
            yield Finding("environment", "discovery", "warning", warning)
        else:
            message = warning.removeprefix(subject).strip()
            yield Finding("environment", subject, "warning", message, "correct the variable")


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
