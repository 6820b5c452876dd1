"""The kernel kind: a fused layer in the place of one of the model's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import BindContext, Recordable, unknown
from jackfield.contracts.requirements import DEVICES, DTYPES, Requirements, one_process

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class KernelCapabilities:
    """What a kernel declares.

    A capability that is not declared counts as missing.

    Attributes:
        devices: torch device types.
        dtypes: Those of the layer's parameters and inputs.
        batch_invariant: The bits of a row of its output do not depend on the other rows.
        recordable: What its functions tell the device can be recorded and played again: they wait
            for nothing, read nothing on the host, and launch the same for the same shapes.
        beside_compiled: It is for many tokens at once, so where steps are compiled it may be left
            out of those: there, layers are the model's own, and it replaces them in the others.

    Raises:
        ValueError: A name is unknown, or a set is empty.
    """

    devices: frozenset[str]
    dtypes: frozenset[str] = frozenset(DTYPES)
    batch_invariant: bool = False
    recordable: bool = False
    beside_compiled: bool = False

    def __post_init__(self) -> None:
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.devices, DEVICES, "device")
        if not (self.dtypes and self.devices):
            raise ValueError("a kernel needs at least one dtype and one device")


@dataclass(frozen=True)
class FusedLayer:
    """What takes the place of the `forward` of the layers that a kernel `fits`.

    Attributes:
        make: `make(module)` returns the function that is called in place of the layer's `forward`,
            with the same arguments and result. It is called once a layer, when the weights are on
            their device. The function reads the module's own parameters and changes neither them
            nor its inputs.
        source: Says in reports whose kernel it is.
    """

    make: Callable[[nn.Module], Callable[..., Any]]
    source: str | None = None


class Kernel(Recordable):
    """A fused layer in the place of the model's own.

    Layers that it replaces have a parameter, and take one tensor whose last dimension is that of
    the first parameter.

    Violations: the first layer of each class and shapes of parameters is compared with the kernel,
    on 1, 2, 5 and 2 x 3 random rows; then each layer with its own, on 5. An output of another shape
    or dtype, or one that is further from the layer's own in float64 than twice the layer's rounding
    and a little, or an input that was written into, is an ExecutionError when the model is loaded,
    and a warning where `auto` chose it, which then goes on without. Errors with other inputs are
    not detected. Calls are counted. Where steps are recorded whole, it has to be `recordable`.
    """

    kind: ClassVar[str] = "kernel"
    bound: ClassVar[tuple[type, ...]] = (FusedLayer,)
    capabilities: ClassVar[KernelCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare the job with `capabilities`; extend it for what those cannot express.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.

        Returns:
            Reasons against it; an empty list accepts.
        """
        del options
        r, can, reasons = requirements, self.capabilities, []
        if r.device is not None and r.device not in can.devices:
            reasons.append(f"does not run on {r.device} (only {', '.join(sorted(can.devices))})")
        if r.dtype not in can.dtypes:
            reasons.append(
                f"does not run with dtype {r.dtype} (only {', '.join(sorted(can.dtypes))})"
            )
        if r.traced and not can.beside_compiled:
            reasons.append("is called and counted one by one, and steps are compiled as a whole")
        if r.offloaded or r.several_places:
            where = r.several_places or ", ".join(r.offloaded)
            reasons.append(f"replaces layers on one device only, and weights lie on {where}")
        if r.batch_invariant and not can.batch_invariant:
            reasons.append("is not batch-invariant, which deterministic=True needs")
        return reasons

    def impossible(self, requirements: Requirements) -> list[str]:
        """That a model is shared by several processes, whose layers are parts of its own.

        Args:
            requirements: The job.
        """
        return one_process(requirements, "replaces layers that are whole")

    @abstractmethod
    def fits(self, module: nn.Module, options: Any) -> bool:
        """Whether a module is a layer that it replaces: by its class, attributes and shapes.

        Asked before weights are read, when there are no numbers (torch's meta device), and again
        when they are there; both answers must agree. A model in which it fits nothing is refused.

        Args:
            module: Any module of a model; for reading.
            options: An instance of `options`.
        """

    @abstractmethod
    def bind(self, context: BindContext) -> FusedLayer:
        """Return what takes the place of layers. Called once a model, when its weights are there.

        Args:
            context: `model` on its device. The engine puts the functions in, not `bind`.
        """

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), KernelCapabilities):
            found.append("`capabilities` must be a KernelCapabilities")
        return found
