"""Where a varlen kernel comes from: an installed package, a pinned kernel of the hub, torch.

A backend names its sources in the order of preference; the first that can do the job is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    Requirements,
)
from jackfield.errors import PlanError
from jackfield_plugins.hub_kernels import KernelRefused

if TYPE_CHECKING:
    from jackfield_plugins.attention.varlen import VarlenKernel

logger = logging.getLogger("jackfield")

#: What a varlen kernel can have and need not; the rest is in every one of them.
VARLEN_FEATURES = frozenset({"grouped_query", "sliding_window", "softcap", "sinks"})


class Source(ABC):
    """One place to take a kernel from. `vet` may run long the first time, and is remembered."""

    @abstractmethod
    def __str__(self) -> str:
        """What it is called in reasons."""

    @abstractmethod
    def vet(self, needs: Requirements) -> int | None:
        """Of which number a page size must be a multiple to be read in place; None: none is.

        Raises KernelRefused with the reason why it cannot serve this job.
        """

    @abstractmethod
    def load(self, needs: Requirements) -> tuple[VarlenKernel, str]:
        """The kernel, in this process, and what reports call its source."""

    @abstractmethod
    def content(self, needs: Requirements) -> str:
        """Its version or the hash of its content. Raises KernelRefused."""


@dataclass(frozen=True)
class Package(Source):
    """An installed package with a `flash_attn_varlen_func`."""

    module: str
    distributions: tuple[str, ...]

    def __str__(self) -> str:
        return f"the package {self.distributions[0]}"

    def vet(self, needs: Requirements) -> int | None:
        if importlib.util.find_spec(self.module) is None:
            raise KernelRefused("is not installed")
        return _checked(self._kernel(), needs)

    def load(self, needs: Requirements) -> tuple[VarlenKernel, str]:
        return self._kernel(), f"{self.distributions[0]} {self._version()}"

    def content(self, needs: Requirements) -> str:
        return self._version()

    def _kernel(self) -> VarlenKernel:
        from jackfield_plugins.attention.published import kernel_of

        try:
            module = importlib.import_module(self.module)
            with_kvcache = getattr(module, "flash_attn_with_kvcache", None)
            return kernel_of(module.flash_attn_varlen_func, with_kvcache)
        except Exception as error:  # an extension module built for another torch
            raise KernelRefused(f"does not import ({type(error).__name__}: {error})") from error

    def _version(self) -> str:
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return str(getattr(importlib.import_module(self.module), "__version__", "unknown"))


@dataclass(frozen=True)
class TorchVarlen(Source):
    """torch's own flash kernel for ragged batches."""

    def __str__(self) -> str:
        return "torch.nn.attention.varlen"

    def vet(self, needs: Requirements) -> int | None:
        return _checked(self._kernel(), needs)

    def load(self, needs: Requirements) -> tuple[VarlenKernel, str]:
        import torch

        return self._kernel(), f"torch.nn.attention.varlen of torch {torch.__version__}"

    def content(self, needs: Requirements) -> str:
        import torch

        return str(torch.__version__)

    def _kernel(self) -> VarlenKernel:
        from jackfield_plugins.attention.published import torch_varlen

        try:
            from torch.nn.attention import varlen
        except ImportError as error:
            raise KernelRefused(f"does not import ({error})") from error
        return torch_varlen(varlen.varlen_attn)


@dataclass(frozen=True)
class HubKernel(Source):
    """A kernel repository at a revision. `function` None: whichever varlen function it has."""

    repo: str
    revision: str
    function: str | None = None

    def __str__(self) -> str:
        return f"the kernel {self.repo}@{self.revision}"

    def vet(self, needs: Requirements) -> int | None:
        return self._vetted(needs)[2]

    def load(self, needs: Requirements) -> tuple[VarlenKernel, str]:
        from jackfield_plugins.attention.varlen_probe import kernel_in
        from jackfield_plugins.hub_kernels.repository import load_build

        folder, content, multiple = self._vetted(needs)
        kernel = replace(kernel_in(load_build(folder), self.function), page_multiple=multiple)
        return kernel, f"{self.repo}@{self.revision} ({folder.name}, {content[:19]})"

    def content(self, needs: Requirements) -> str:
        return self._vetted(needs)[1]

    def _vetted(self, needs: Requirements) -> tuple[Any, str, int | None]:
        """Its folder, its content's digest, and what `vet` says. Raises KernelRefused."""
        from jackfield_plugins.hub_kernels import lock, repository, trust

        trust.check_publisher(self.repo)
        pin = repository.Pin(self.repo, self.revision, needs.device or _likely_device())
        folder = repository.find_build(pin)
        content, name = lock.digest(folder), f"{pin}/{folder.name}"
        lock.check(name, content)
        request = {
            "folder": str(folder),
            "function": self.function,
            "device": pin.device,
            "dtype": needs.dtype,
            "head_dims": list(needs.head_dims),
            "group": needs.num_attention_heads // needs.num_key_value_heads,
            "features": sorted(VARLEN_FEATURES & needs.features.keys()),
        }
        answer = _probed(json.dumps(request), content)
        lock.record(name, content)
        return folder, content, answer["page_multiple"]


@functools.lru_cache(maxsize=256)
def _tried(request: str, content: str) -> Mapping[str, Any] | KernelRefused:
    """What a process of its own found out about these bytes and this job."""
    from jackfield_plugins.hub_kernels.probing import probe

    del content  # a part of the key: other bytes are another kernel
    try:
        return probe("jackfield_plugins.attention.varlen_probe", json.loads(request))
    except KernelRefused as refused:
        return refused


def _probed(request: str, content: str) -> Mapping[str, Any]:
    answer = _tried(request, content)
    if isinstance(answer, KernelRefused):
        raise KernelRefused(str(answer))
    if "refused" in answer:
        raise KernelRefused(answer["refused"])
    return answer


def _likely_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _checked(kernel: VarlenKernel, needs: Requirements) -> int | None:
    if lacking := sorted((VARLEN_FEATURES & needs.features.keys()) - kernel.features):
        raise KernelRefused(f"has no parameter for {', '.join(lacking)}")
    return kernel.page_multiple


#: What FlashAttention's own kernels can do, of either generation.
FLASH = AttentionCapabilities(
    layouts=frozenset({"padded", "packed"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    devices=frozenset({"cuda"}),
    features=frozenset({"grouped_query", "sliding_window", "softcap"}),
    head_dims=frozenset(range(8, 257, 8)),
)


class VarlenAttention(Attention):
    """An attention on the first of its sources that can do the job. Says which in reports."""

    @abstractmethod
    def sources(self, options: Any) -> Sequence[Source]:
        """Where its kernel may come from, the preferred one first."""

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if not reasons and "flash" in requirements.model_declines:
            reasons.append(f"{requirements.architecture} declares that it must not run with flash")
        if reasons or requirements.elsewhere:  # sources are those of this machine
            return reasons
        source, _, passed_over = self._choose(requirements, options)
        return [] if source is not None else passed_over

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """Pages of a size that its kernel reads where they lie."""
        if requirements.elsewhere or requirements.layout != "packed":
            return requirements
        _, multiple, _ = self._choose(requirements, options)
        return replace(requirements, page_multiple=multiple or 1)

    def pins(self, requirements: Requirements, options: Any) -> Mapping[str, str]:
        source, _, _ = self._choose(requirements, options)
        return {} if source is None else {str(source): source.content(requirements)}

    def bind(self, context: BindContext) -> BoundAttention:
        from jackfield_plugins.attention.varlen import bind_varlen

        needs = context.requirements
        source, _, passed_over = self._choose(needs, context.options)
        if source is None:
            raise PlanError(f"attention {self.name!r} can no longer run: {'; '.join(passed_over)}")
        for reason in passed_over:
            logger.info("attention %s passed over %s", self.name, reason)
        kernel, called = source.load(needs)
        logger.info("attention %s runs on %s", self.name, called)
        return bind_varlen(kernel, needs.windows, called)

    def _choose(
        self, needs: Requirements, options: Any
    ) -> tuple[Source | None, int | None, list[str]]:
        """The first source that will do, what its `vet` says, and why those before it will not."""
        passed_over = []
        for source in self.sources(options):
            try:
                multiple = source.vet(needs)
            except KernelRefused as refused:
                passed_over.append(f"{source}: {refused}")
            else:
                return source, multiple, passed_over
        return None, None, passed_over
