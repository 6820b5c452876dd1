"""From a repository's name to a folder on this machine, and from that folder to a module."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from jackfield.errors import shown
from jackfield_plugins.hub_kernels import KernelRefused

_importing = threading.Lock()


@dataclass(frozen=True)
class Pin:
    """One build of a kernel repository: `org/name` at a revision, for a torch device type."""

    repo: str
    revision: str
    device: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def find_build(pin: Pin) -> Path:
    """The folder of the build for this machine, fetched if it must be. Raises KernelRefused.

    Looks at `LOCAL_KERNELS`, then at the cache, then on the hub. Runs nothing of the kernel.
    """
    if importlib.util.find_spec("kernels") is None:
        raise KernelRefused("needs the package 'kernels': pip install jackfield[kernels]")
    try:
        folder = _local(pin) or _cached(pin) or _fetched(pin)
    except KernelRefused:
        raise
    except Exception as error:
        raise KernelRefused(f"{pin} cannot be had: {brief(error)}") from error
    if dependencies := _metadata(folder).kernel_depends:
        names = ", ".join(dependency.repo_id for dependency in dependencies)
        raise KernelRefused(f"it needs other kernels ({names}), which nobody pinned")
    return folder


def load_build(folder: Path) -> ModuleType:
    """Import the kernel in `folder`, which `find_build` found. Bytecode beside it is not used."""
    from kernels import get_local_kernel

    # A .pyc beside the source would be run in its place, and is not part of the digest.
    with _importing, tempfile.TemporaryDirectory() as elsewhere:
        before, sys.pycache_prefix = sys.pycache_prefix, elsewhere
        try:
            module: ModuleType = get_local_kernel(folder)
        finally:
            sys.pycache_prefix = before
    return module


def brief(error: BaseException) -> str:
    """The first line of an error's text, for use inside a reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shown(lines[0].rstrip(":.")) if lines else type(error).__name__


def _backend(pin: Pin) -> str | None:
    return "cpu" if pin.device == "cpu" else None  # None: what torch was built for


def _metadata(folder: Path) -> Any:
    from kernels import Metadata

    try:
        return Metadata.read_from_file(folder / "metadata.json")
    except (OSError, ValueError) as error:
        raise KernelRefused(f"its metadata.json cannot be read: {brief(error)}") from None


def _local(pin: Pin) -> Path | None:
    """What `LOCAL_KERNELS="org/name=folder:…"` says, as the `kernels` package reads it."""
    for entry in os.environ.get("LOCAL_KERNELS", "").split(":"):
        repo, _, folder = entry.partition("=")
        if repo == pin.repo:
            return _build_in(Path(folder), pin)
    return None


def _build_in(folder: Path, pin: Pin) -> Path:
    from kernels.resolver import resolve_local_kernel

    builds = folder / "build"
    if not builds.is_dir():
        raise KernelRefused(f"LOCAL_KERNELS names {folder}, which has no folder 'build'")
    try:
        found: Path = resolve_local_kernel(folder, backend=_backend(pin)).variant_path
    except FileNotFoundError:
        names = ", ".join(sorted(path.name for path in builds.iterdir())) or "none"
        raise KernelRefused(
            f"{pin} has no build for {pin.device} on this machine (its builds: {names})"
        ) from None
    return found


def _cached(pin: Pin) -> Path | None:
    try:
        return _install(pin, local_files_only=True)
    except (FileNotFoundError, ValueError):
        return None


def _fetched(pin: Pin) -> Path:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif not _reachable(constants.ENDPOINT):
        why = f"{constants.ENDPOINT} cannot be reached"
    else:
        try:
            return _install(pin, local_files_only=False)
        except FileNotFoundError as error:
            if "variant" not in str(error):
                raise
            raise KernelRefused(f"{pin} has no build for {pin.device} on this machine") from None
    raise KernelRefused(
        f"{pin} is not in the cache and {why}; fetch it once with a network, or name a folder "
        f"with LOCAL_KERNELS={pin.repo}=<folder>"
    )


def _install(pin: Pin, *, local_files_only: bool) -> Path:
    from huggingface_hub.file_download import repo_folder_name
    from kernels import install_kernel

    found: Path = install_kernel(
        pin.repo,
        revision=pin.revision,
        backend=_backend(pin),
        local_files_only=local_files_only,
        trust_remote_code=True,  # `trust` has asked already, by a rule that holds offline as well
    )
    names = {repo_folder_name(repo_id=pin.repo, repo_type=t) for t in ("kernel", "model")}
    if not names & set(found.parts):
        raise KernelRefused(f"{pin} leads to another repository ({found}); name that one")
    return found


def _reachable(endpoint: str) -> bool:
    """Whether the hub's name can be looked up; the hub's client tries for half a minute."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True
