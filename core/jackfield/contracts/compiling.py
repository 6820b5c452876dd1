"""The compiler kind: how a step is executed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, unknown
from jackfield.contracts.native import NativeOffers
from jackfield.contracts.requirements import DEVICES, DTYPES, Requirements, one_process
from jackfield.errors import PlanError

if TYPE_CHECKING:
    import torch

    ModelStep = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]

#: Held while a model is built, or its weights are read, and by who calls `torch.export`, which says
#: of the whole process, in variables of its own, that it traces.
TRACING = threading.RLock()

#: What a model needs of its attention -> why a step of it cannot be compiled. The compiled part
#: ends at the attention, which is called as it is: with the mask that transformers makes.
_NOT_COMPILED = {
    "own_attention": "cannot take the model's own attention out of what it compiles",
    "own_mask": "cannot make the mask that the model makes itself",
    "bidirectional_prefix": "cannot make the mask of a prefix that is read in both directions",
    "cross_attention": "cannot take out the attention to what an encoder said",
    "position_bias": "would compile anew for every bias that the model makes for its length",
}


@dataclass(frozen=True, kw_only=True)
class CompilerCapabilities:
    """What a compiler declares.

    A capability that is not declared counts as missing.

    Attributes:
        dtypes: Those of weights and activations.
        devices: torch device types.
        batch_invariant: The bits of a token's logits do not depend on the other tokens of the step.
        records: Where attention, cache and kernels are `recordable`, whole steps are recorded and
            played (`Compilation.record`).

    Raises:
        ValueError: A name is unknown, or a set is empty.
    """

    dtypes: frozenset[str] = frozenset(DTYPES)
    devices: frozenset[str] = frozenset(DEVICES)
    batch_invariant: bool = False
    records: bool = False

    def __post_init__(self) -> None:
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.devices, DEVICES, "device")
        if not (self.dtypes and self.devices):
            raise ValueError("a compiler needs at least one dtype and one device")


class Compilation(ABC):
    """A compiler bound to a model: compiles its step for one shape after another.

    Violations: PluginError where `compile` returns the step itself or no function, the compiled
    step returns other shapes, a layer does not call its attention or calls it twice, `fill` returns
    less than it was given, or nothing is counted in `graphs`. Wrong numbers are not detected.

    Attributes:
        source: By what it compiles; goes into reports.
        graphs: How many were compiled so far; the backend counts.
        seconds: The time that took, from the first call of a shape to its first computation.
        kept: How many of `graphs` are on disk for the next process; the backend counts.
        num_bytes: What recordings take on the device.
        reads_up_to: Steps of so many tokens that read prompts may be compiled, where `reads` says
            so; `ahead` is asked for them as well where prompts will come.
        anew: A request came, and the model may have been changed before it. Set by the engine; a
            backend that keeps what it compiled compares the whole model then, and unsets it.
        offers: What the plan's other backends offer as functions in C; set before `compile`.
    """

    source: str | None = None
    graphs: int = 0
    seconds: float = 0.0
    kept: int = 0
    reads_up_to: int = 0
    anew: bool = True
    offers: NativeOffers = NativeOffers()

    @property
    def num_bytes(self) -> int:
        """What recordings take on the device; 0 where nothing is recorded."""
        return 0

    def fill(self, count: int) -> int:
        """The size to which a step is padded, so that few shapes are compiled; `count` by default.

        Asked for rows, for tokens a row, and for columns whose logits are wanted, each by itself.

        Args:
            count: How many there are, at least 1.

        Returns:
            `count` or more.
        """
        return count

    def reads(self, rows: int, width: int) -> bool:
        """Whether a step that reads prompts is compiled as well; by default none is.

        Asked in each such step. Of those in which every sequence decodes, `decodes` is asked.

        Args:
            rows: Of its ids, filled up.
            width: Tokens of a row, filled up.
        """
        del rows, width
        return False

    def decodes(self) -> bool:
        """Whether a decode step that is not played whole is compiled; by default it is."""
        return True

    @abstractmethod
    def compile(self, step: ModelStep) -> ModelStep:
        """Make a function that does what `step` does. Called once a model; compiles nothing yet.

        The function compiles for each shape when it first comes. It must never run the step as it
        is.

        Args:
            step: `step(input_ids, position_ids, keep)` takes two int64 `[rows, tokens]`, whose
                sizes are values of `fill`, and the columns whose logits are wanted, int64
                `[columns]`, None: all of them. It returns logits `[rows, columns, vocab]`. It is
                the model without its attention: every attention is one call of the operator
                `jackfield::attend`, which must be kept, once a layer and in order, and which runs
                in plain Python. So a compiler need not know caches, lengths or attentions.

        Returns:
            A function of the same arguments, which raises ExecutionError where the step cannot be
            compiled. Its logits are read before it is called again.
        """

    def ahead(self, step: ModelStep, sizes: Seq[tuple[int, int]]) -> None:
        """Make now what steps of these sizes will need, so that no request waits for it.

        Called, if at all, after `compile` and before requests come; nothing of a step runs. What
        can only be made when a step comes is made then.

        Args:
            step: As in `compile`.
            sizes: (rows, tokens of a row), values of `fill`, ascending.

        Raises:
            ExecutionError: The step cannot be compiled.
        """
        del step, sizes

    def close(self) -> None:
        """Free what was recorded; torch may keep the graphs longer than the engine lives."""
        return

    def sizes(self, most: int) -> list[int]:
        """The batch sizes to record, ascending, for at most `most` sequences."""
        del most
        return []

    def not_played(self) -> str | None:
        """Why steps that were recorded run as they are now; None, by default: they are played.

        Asked before each of them, and before they are recorded.
        """
        return None

    def forget(self) -> None:
        """Let go of what was recorded: no whole step is played any more; `compile` goes on."""
        return

    def record(self, step: ModelStep) -> ModelStep:
        """Like `compile`, for steps whose tensors and attention lie at fixed places.

        What it returns is called with each of `sizes` while a model is loaded, and then records;
        later it plays, and records again where a tensor or the model is not what it was. The
        attention is called while it records, any number of times, and never while it plays. What is
        recorded may be the step as it is. Asked for where the backend declares `records`.

        Args:
            step: As in `compile`, with the attention in it.

        Raises:
            ExecutionError: A size cannot be recorded. Nothing is left of it, and steps of that size
                run as all others do.
        """
        raise NotImplementedError(f"{type(self).__name__} records no whole steps")


@dataclass(frozen=True)
class Uncompiled:
    """Steps run as the model's code has them."""


class Compiler(Backend):
    """How a step is executed.

    One that is chosen asks the quantizer and the cache for `compiles` in their own capabilities.

    Attributes:
        compiles: False for the one that leaves steps as they are.
    """

    kind: ClassVar[str] = "compiler"
    bound: ClassVar[tuple[type, ...]] = (Compilation, Uncompiled)
    compiles: ClassVar[bool] = True
    capabilities: ClassVar[CompilerCapabilities]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare the job with `capabilities`; extend it for what those cannot express.

        What cannot be taken apart is refused for every compiler: a model's own attention, masks or
        biases, linear-attention layers, code that numbers of a step decide (`branches`), experts
        that are computed one by one, and models on several devices.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.

        Returns:
            Reasons against it; an empty list accepts.
        """
        del options
        return self._lacks(requirements) if self.compiles else []

    def _lacks(self, r: Requirements) -> list[str]:
        can = self.capabilities
        reasons = [
            f"{problem} ({r.features[feature]})"
            for feature, problem in _NOT_COMPILED.items()
            if feature in r.features
        ]
        if "linear_attention" in r.layer_types:
            reasons.append("cannot take the state of linear-attention layers out of the model")
        if places := r.several_places:
            reasons.append(f"compiles models on one device, and weights go to {places}")
        if r.irregular:
            reasons.append(f"needs one attention call for each cached layer; here {r.irregular}")
        if r.branches:
            reasons.append(f"cannot trace what numbers of a step decide; here {r.branches}")
        if r.experts_implementation:
            reasons.append(f"needs experts in a grouped product, which {r.no_grouped_experts}")
        if r.device is not None and r.device not in can.devices:
            reasons.append(f"does not run on {r.device} (only {', '.join(sorted(can.devices))})")
        if r.dtype not in can.dtypes:
            reasons.append(f"does not run with dtype {r.dtype}")
        if r.batch_invariant and not can.batch_invariant:
            reasons.append("is not batch-invariant, which deterministic=True needs")
        return reasons

    def impossible(self, requirements: Requirements) -> list[str]:
        """That steps are shared by several processes, or differ by request, as none compiled does.

        Args:
            requirements: The job.
        """
        if not self.compiles:
            return []
        reasons = one_process(requirements, "compiles steps of one process")
        if requirements.request_adapters:
            reasons.append("compiles steps in which all requests have the same adapter (adapters)")
        return reasons

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """That steps are compiled (`compiled`) and therefore `traced`, and whole ones recorded
        where they are (`recorded`).

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.
        """
        if not self.compiles:
            return requirements
        records = self.capabilities.records and not self.unrecordable(requirements, options)
        return replace(requirements, compiled=True, traced=True, recorded=records)

    def unrecordable(self, requirements: Requirements, options: Any) -> list[str]:
        """Why it records no whole steps of this job, though it `records`; empty: it does.

        Args:
            requirements: The job, as in `refuse`.
            options: The options that were selected.
        """
        del requirements, options
        return []

    def warmed(self, requirements: Requirements) -> None:
        """What steps of this job were compiled to is on disk; `auto` may choose it from now on.

        Called by `jackfield warm`, after `ahead` with each size, where `kept` says that all of
        `graphs` are on disk.

        Args:
            requirements: The job, as it was planned.

        Raises:
            PlanError: It keeps nothing on disk, or could not.
        """
        del requirements
        raise PlanError(f"auto does not take {self.name} for what is on disk; warm 'native'")

    @abstractmethod
    def bind(self, context: BindContext) -> Compilation | Uncompiled:
        """Return what compiles the steps of one model. Called once a model; compiles nothing yet.

        Args:
            context: `model` with its weights, before its attention is installed.
        """

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), CompilerCapabilities):
            found.append("`capabilities` must be a CompilerCapabilities")
        return found
