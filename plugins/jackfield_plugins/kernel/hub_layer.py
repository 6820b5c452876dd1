"""``hub-layer``: a layer of a kernel repository of the Hugging Face Hub, by revision."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities, Requirements
from jackfield.contracts.requirements import DEVICES
from jackfield.errors import PlanError
from jackfield_plugins.hub_kernels import KernelRefused

if TYPE_CHECKING:
    from torch import nn

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class HubLayerOptions:
    """`repo` is `org/name`, `revision` a commit, tag or branch; its content is locked either way.

    `layer` is the class in the kernel's `layers`; `replaces` what the names of the classes that it
    stands in for end with, by default the same.
    """

    repo: str
    revision: str
    layer: str = "RMSNorm"
    replaces: str | None = None

    def __post_init__(self) -> None:
        if not _REPOSITORY.fullmatch(self.repo):
            raise ValueError(f"repo must be 'organisation/name', not {self.repo!r}")
        if not self.layer.isidentifier():
            raise ValueError(f"layer must be the name of a class, not {self.layer!r}")


class HubLayer(Kernel):
    """Layers as the `kernels` package defines them: classes without state, of which `forward` is
    called with the model's own layer as `self`.
    """

    name = "hub-layer"
    options = HubLayerOptions
    capabilities = KernelCapabilities(devices=frozenset(DEVICES))

    def refuse(self, requirements: Requirements, options: HubLayerOptions) -> list[str]:
        if reasons := super().refuse(requirements, options):
            return reasons
        try:
            _vetted(options, requirements)
        except KernelRefused as refused:
            return [f"the kernel {options.repo}@{options.revision}: {refused}"]
        return []

    def pins(self, requirements: Requirements, options: HubLayerOptions) -> Mapping[str, str]:
        _, content = _vetted(options, requirements)
        return {f"the kernel {options.repo}@{options.revision}": content}

    def fits(self, module: nn.Module, options: HubLayerOptions) -> bool:
        own = any(True for _ in module.parameters())
        return own and type(module).__name__.endswith(options.replaces or options.layer)

    def bind(self, context: BindContext) -> FusedLayer:
        from jackfield_plugins.hub_kernels.repository import load_build

        options = context.options
        try:
            folder, content = _vetted(options, context.requirements)
        except KernelRefused as refused:
            raise PlanError(f"kernel 'hub-layer' can no longer run: {refused}") from None
        layer = getattr(load_build(folder).layers, options.layer)

        def make(module: nn.Module) -> Any:
            return functools.partial(layer.forward, module)

        source = f"{options.repo}@{options.revision} ({folder.name}, {content[:19]})"
        return FusedLayer(make, source)


def _vetted(options: HubLayerOptions, needs: Requirements) -> tuple[Path, str]:
    """The folder of its build, and its content's digest. Raises KernelRefused."""
    from jackfield_plugins.hub_kernels import lock, repository, trust

    trust.check_publisher(options.repo)
    pin = repository.Pin(options.repo, options.revision, needs.device or "cpu")
    folder = repository.find_build(pin)
    content, name = lock.digest(folder), f"{pin}/{folder.name}"
    lock.check(name, content)
    request = {"folder": str(folder), "layer": options.layer}
    if "refused" in (answer := _tried(json.dumps(request), content)):
        raise KernelRefused(answer["refused"])
    lock.record(name, content)
    return folder, content


@functools.lru_cache(maxsize=256)
def _tried(request: str, content: str) -> Mapping[str, Any]:
    """What a process of its own found when it imported these bytes."""
    from jackfield_plugins.hub_kernels.probing import probe

    del content  # a part of the key: other bytes are another kernel
    try:
        return probe("jackfield_plugins.kernel.hub_probe", json.loads(request))
    except KernelRefused as refused:
        return {"refused": str(refused)}


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [HubLayer()]
