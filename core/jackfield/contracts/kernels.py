"""The kernel kind: what takes the place of a model's own layers, or of how they rotate."""

from __future__ import annotations

import dis
import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import BindContext, Recordable, unknown
from jackfield.contracts.native import NativeOperators
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
        traceable: A compiler may trace its functions: while `torch.compiler.is_compiling()`, they
            are code of torch, or call an operator of `torch.library` that has a fake.

    Raises:
        ValueError: A name is unknown, or a set is empty.
    """

    devices: frozenset[str]
    dtypes: frozenset[str] = frozenset(DTYPES)
    batch_invariant: bool = False
    recordable: bool = False
    beside_compiled: bool = False
    traceable: bool = False

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


@dataclass(frozen=True)
class FusedRotary:
    """What takes the place of the function by which attention layers rotate queries and keys.

    It stands in for `apply_rotary_pos_emb`, as the module in which a layer's class is written has
    it, in the layers that a kernel `fits` and in no others; `rotary_of` finds it.

    Attributes:
        make: `make(module)` returns the function, which is called as the layer calls its own:
            `q` `[batch, heads, tokens, size]`, `k` `[batch, key heads, tokens, size]`, `cos` and
            `sin` `[batch, tokens, turned]`, or `[1, tokens, turned]` for all texts, of the layer's
            dtype or wider, and whatever more the layer gives, by position or by name: where there
            is more, `unsqueeze_dim` say, it may leave the call to the layer's own function.
            `turned` is `size`, or less where a part of a head is rotated. It returns `q` and `k`
            rotated, in the same shapes and in their dtype, also where cosines are wider and the
            layer's own function gives that. It changes no input. Tensors may have any strides.
        source: Says in reports whose kernel it is.
    """

    make: Callable[[nn.Module], Callable[..., Any]]
    source: str | None = None


#: What `FusedRotary` stands in for, by its name in the modules of transformers.
ROTARY = "apply_rotary_pos_emb"


#: What layers with both, as DeepSeek's, call where their config says `rope_interleave`.
_OTHER = "apply_rotary_pos_emb_interleave"


def rotary_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function of the name `apply_rotary_pos_emb` that a layer calls; None: it calls none.

    Mostly it is `(q, k, cos, sin) -> (q, k)`. Some families' takes one tensor, or other angles.

    Args:
        module: Any module of a model; for reading.
    """
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or not _calls_rotary(code):
        return None
    config = getattr(module, "config", None)
    if _OTHER in code.co_names and getattr(config, "rope_interleave", False):
        return None
    found: Callable[..., Any] | None = forward.__globals__.get(ROTARY)
    return found


@functools.cache
def _calls_rotary(code: Any) -> bool:
    """Whether it is a name of the module, and no method's."""
    if ROTARY not in code.co_names:
        return False
    return any(i.opname == "LOAD_GLOBAL" and i.argval == ROTARY for i in dis.get_instructions(code))


class Kernel(Recordable):
    """A fused layer in the place of the model's own, or a rotation in the place of a layer's.

    Layers that a `FusedLayer` replaces have a parameter, and take one tensor whose last dimension
    is that of the first parameter. Those of a `FusedRotary` call `apply_rotary_pos_emb`.

    Violations: the first layer of each class and shapes of parameters is compared with the kernel,
    on 1, 2, 5 and 2 x 3 random rows; then each layer with its own, on 5. An output of another shape
    or dtype, or one that is further from the layer's own in float64 than twice the layer's rounding
    and a little, or an input that was written into, is an ExecutionError when the model is loaded,
    and a warning where `auto` chose it, which then goes on without. A rotation is
    held to the layer's own function in the same way: of the first layer of each class and number of
    heads 1, 2 and 5 tokens, two texts of 1 and 3, with angles of their own, shared ones and wider
    ones, all of a head turned and half of it; of the others two texts of 3. Errors with other
    inputs are not detected. Calls are counted. Where steps are recorded whole, it has to be
    `recordable`.
    """

    kind: ClassVar[str] = "kernel"
    bound: ClassVar[tuple[type, ...]] = (FusedLayer, FusedRotary)
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
        if r.traced and not (can.beside_compiled or can.traceable):
            reasons.append("cannot be traced, and steps are compiled as a whole")
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
    def bind(self, context: BindContext) -> FusedLayer | FusedRotary:
        """Return what takes the place of layers, or of how they rotate.

        Called once a model, when its weights are there.

        Args:
            context: `model` on its device. The engine puts the functions in, not `bind`.
        """

    def native_operators(self) -> NativeOperators:
        """The operators of torch that its functions call while a compiler traces them, and that
        are functions in C as well; by name.

        Asked when a model is bound whose steps are compiled, of one that is `traceable`.
        """
        return {}

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), KernelCapabilities):
            found.append("`capabilities` must be a KernelCapabilities")
        return found
