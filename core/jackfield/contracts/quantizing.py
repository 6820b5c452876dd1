"""The quantizer kind: how weights are stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, unknown
from jackfield.contracts.checkpoint import Field, Tensors
from jackfield.contracts.requirements import BYTES, DEVICES, DTYPES, Requirements, Weight

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

#: Where nobody named a dtype and the model's own does not do: the first of these that does.
PREFERRED = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class QuantizerCapabilities:
    """What a quantizer declares. What is not declared is not had.

    `dtypes` are those of activations and of the weights that stay as they are. `offload`: layers
    may lie on several devices or on disk. `adapters`: a LoRA adapter can be put on top of it, and
    with `merges` be added into its weights. `batch_invariant`: the bits of a row of a layer's
    output do not depend on the other rows. `compiles`: its layers can be traced by a compiler.
    """

    dtypes: frozenset[str] = frozenset(DTYPES)
    devices: frozenset[str] = frozenset(DEVICES)
    offload: bool = False
    adapters: bool = False
    merges: bool = False
    batch_invariant: bool = False
    compiles: bool = False

    def __post_init__(self) -> None:
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.devices, DEVICES, "device")
        if not (self.dtypes and self.devices):
            raise ValueError("a quantizer needs at least one dtype and one device")
        if self.merges and not self.adapters:
            raise ValueError("a quantizer that merges adapters takes adapters")


@dataclass(frozen=True)
class GivenConfig:
    """The options of a quantizer for which the caller gave a transformers config object."""

    config: Any

    def to_dict(self) -> dict[str, Any]:
        return {"config": type(self.config).__name__, **self.config.to_dict()}


def _as_it_is(model: PreTrainedModel) -> None:
    del model


def _anything(tensors: Tensors) -> list[str]:
    del tensors
    return []


@dataclass(frozen=True)
class Quantization:
    """How `from_pretrained` is to store a model's weights.

    `config` is handed to it; None: weights are read as the checkpoint has them. `misfits` is asked
    first, with the `StoredTensor` of every name in a folder's files, why these are not what the
    config says. Weights are read within `reading()`, the place for what a library prints or fetches
    meanwhile. `finish` is called once with the model that was read, in whose class, config and
    layers it may set right what the library left.
    """

    config: QuantizationConfigMixin | None
    misfits: Callable[[Tensors], list[str]] = _anything
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    finish: Callable[[PreTrainedModel], None] = _as_it_is


class Quantizer(Backend):
    """How weights are stored. `bind` is called before there is a model.

    A backend either quantizes while weights are read, or reads a checkpoint that was quantized:
    which of both is in `requirements.stored`.
    """

    kind: ClassVar[str] = "quantizer"
    bound: ClassVar[tuple[type, ...]] = (Quantization,)
    capabilities: ClassVar[QuantizerCapabilities]
    #: whether weights that are not quantized yet can be
    quantizes: ClassVar[bool] = True
    #: what fields of a checkpoint's `quantization_config` may be, of one that it reads; any other
    #: value is told as the file's fault
    fields: ClassVar[Mapping[str, Field]] = {}

    def reads(self, stored: Mapping[str, Any]) -> bool:
        """Whether a checkpoint, or a config object, with this `quantization_config` is its own.

        `stored` is the dict of transformers' config, with `quant_method` in it.
        """
        del stored
        return False

    def rank(self, requirements: Requirements) -> int | None:
        """``auto`` reads what is quantized already; it never quantizes."""
        stored = requirements.stored
        return 10 if stored is not None and self.reads(stored) else None

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare the job with `capabilities`; extend it for what those cannot express."""
        r, can, reasons = requirements, self.capabilities, []
        if r.stored is not None and not self.reads(r.stored):
            reasons.append(f"the checkpoint is quantized already, with {method(r.stored)}")
        if r.stored is None and not self.quantizes:
            reasons.append("reads quantized checkpoints, and this one is not quantized")
        elif r.stored is None and r.live:
            reasons.append(
                "quantizes while weights are read, and this model is loaded; give its folder or "
                "hub id"
            )
        if r.device is not None and r.device not in can.devices:
            reasons.append(f"does not run on {r.device} (only {', '.join(sorted(can.devices))})")
        if self._dtype(r, options) is None:
            known = ", ".join(_order(self.dtypes(r, options)))
            reasons.append(f"does not run with dtype {r.dtype} (only {known})")
        if r.batch_invariant and not can.batch_invariant:
            reasons.append("is not batch-invariant, which deterministic=True needs")
        return [*reasons, *_lacking(can, r)]

    def dtypes(self, requirements: Requirements, options: Any) -> frozenset[str]:
        """`capabilities.dtypes`; override it where these depend on the device or the options."""
        del requirements, options
        return self.capabilities.dtypes

    def _dtype(self, requirements: Requirements, options: Any) -> str | None:
        """The dtype of what is not quantized; None: the one that was asked for does not do."""
        can = self.dtypes(requirements, options)
        if requirements.dtype in can:
            return requirements.dtype
        return None if requirements.dtype_named else _order(can)[0]

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """The dtype and the size of what the other kinds will find."""
        dtype = self._dtype(requirements, options) or requirements.dtype
        chosen = replace(requirements, dtype=dtype)
        size = None if requirements.live else self.weight_bytes(chosen, options)
        return chosen if size is None else replace(chosen, weight_bytes=size)

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        """What all weights take once they are loaded, in bytes; None where nobody can tell.

        `requirements.dtype` is that of the weights which stay as they are.
        """
        del requirements, options
        return None

    def bind(self, context: BindContext) -> Quantization:
        """Return what `from_pretrained` is to be given. `context.model` is None."""
        return Quantization(self.config_of(context))

    def config_of(self, context: BindContext) -> QuantizationConfigMixin | None:
        """The caller's own config, None for a checkpoint that has one, or `make_config`."""
        if isinstance(context.options, GivenConfig):
            return context.options.config  # type: ignore[no-any-return]
        needs: Requirements | None = context.requirements
        stored = needs is not None and needs.stored is not None
        return None if stored else self.make_config(context)

    @abstractmethod
    def make_config(self, context: BindContext) -> QuantizationConfigMixin | None:
        """The transformers config that quantizes while weights are read.

        `context.config` and `context.requirements` are None where plain transformers code asks
        (`jackfield.quantization`).
        """

    @abstractmethod
    def converted(self, module: nn.Module) -> bool:
        """Whether `module`, of a loaded model, has its weights stored by this quantizer."""

    def runs_on(self, module: nn.Module) -> str | None:
        """Which kernel a converted `module` runs on, or what it waits for, as reports tell it.

        None where there is nothing to tell.
        """
        del module
        return None

    def flaws(self) -> list[str]:
        found = super().flaws()
        if not isinstance(getattr(self, "capabilities", None), QuantizerCapabilities):
            found.append("`capabilities` must be a QuantizerCapabilities")
        return found


def _lacking(can: QuantizerCapabilities, requirements: Requirements) -> list[str]:
    """What of the job is about more than the weights by themselves, and cannot be done."""
    found = []
    if (places := requirements.several_places) and not can.offload:
        found.append(f"keeps all weights on one device (offload), and they go to {places}")
    if requirements.adapter and not can.adapters:
        found.append(f"takes no {requirements.adapter} adapter on top (adapters)")
    if requirements.merge_adapter and not can.merges:
        found.append("cannot merge an adapter into its weights (merges); drop merge_adapter")
    if requirements.compiled and not can.compiles:
        found.append("has layers that are not known to compile (compiles)")
    return found


def method(stored: Mapping[str, Any]) -> str:
    """What a quantization config says its method is."""
    named = stored.get("quant_method")
    return str(getattr(named, "value", named) or "a method that it does not name")


def plain_bytes(requirements: Requirements) -> int:
    """What weights take that are stored as they are, in bytes."""
    return sum(w.numbers * _number_bytes(w.dtype, requirements) for w in requirements.weights)


def mixed_bytes(requirements: Requirements, convert: Callable[[Weight], int | None]) -> int:
    """What weights take where `convert(weight)` says it for those that are stored otherwise.

    None: that one, such as any that is not the matrix of a linear layer, stays as it is.
    """
    total = 0
    for weight in requirements.weights:
        size = convert(weight)
        total += (
            weight.numbers * _number_bytes(weight.dtype, requirements) if size is None else size
        )
    return total


def in_force(requirements: Requirements, options: Any) -> Mapping[str, Any] | None:
    """The transformers config that decides, as a dict; None: `options` do."""
    if requirements.stored is not None:
        return requirements.stored
    return options.config.to_dict() if isinstance(options, GivenConfig) else None


def _number_bytes(dtype: str | None, requirements: Requirements) -> int:
    return BYTES[dtype or requirements.dtype]


def _order(dtypes: frozenset[str]) -> list[str]:
    return [dtype for dtype in PREFERRED if dtype in dtypes]
