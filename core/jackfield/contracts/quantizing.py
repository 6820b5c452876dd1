"""The quantizer kind: how weights are stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.backend import Backend, BindContext, unknown
from jackfield.contracts.checkpoint import Field, Tensors, odd_fields
from jackfield.contracts.native import NativeOperators
from jackfield.contracts.requirements import (
    BYTES,
    DEVICES,
    DTYPES,
    Requirements,
    Weight,
    one_process,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

#: The `quant_method` of a GGUF file's config. Its field `tensors` has, by the model's names, what
#: stays in blocks: the name of their type and the shape, out × in. A file is read as a state dict
#: where these are uint8 `[out, bytes of a row]` for a parameter of uint8, and else numbers.
GGUF_BLOCKS = "gguf-blocks"

#: Where no dtype is named and the model's own is not possible: the first of these that is.
PREFERRED = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class QuantizerCapabilities:
    """What a quantizer declares.

    A capability that is not declared counts as missing.

    Attributes:
        dtypes: Those of activations and of the weights that stay as they are.
        devices: torch device types on which its layers compute.
        offload: Layers may lie on several devices or on disk.
        adapters: PEFT can put adapters on its layers. A LoRA that is not merged needs no such
            thing: it is computed beside any layers.
        merges: An adapter can be added into its weights; needs `adapters`.
        batch_invariant: The bits of a row of a layer's output do not depend on the other rows.
        compiles: Its layers can be traced by a compiler.
        tensor_parallel: Several processes may share a model, each with a part of its weights: what
            is made of a part of a matrix is that part of what is made of the whole (see below).
        relative_error: How far a layer's outputs are from those of the weights that it stores, at
            most: the Euclidean norm of the difference over that of the outputs, for Gaussian
            weights and inputs, beside the error of rounding to the dtype. 0: nothing is lost. None:
            it declares nothing, and the bound follows from its bits a weight.

    Raises:
        ValueError: A name is unknown, a set is empty that must not be, it `merges` adapters that
            it does not take, or `relative_error` is not from 0 to below 1.
    """

    dtypes: frozenset[str] = frozenset(DTYPES)
    devices: frozenset[str] = frozenset(DEVICES)
    offload: bool = False
    adapters: bool = False
    merges: bool = False
    batch_invariant: bool = False
    compiles: bool = False
    tensor_parallel: bool = False
    relative_error: float | None = None

    def __post_init__(self) -> None:
        unknown(self.dtypes, DTYPES, "dtype")
        unknown(self.devices, DEVICES, "device")
        if not (self.dtypes and self.devices):
            raise ValueError("a quantizer needs at least one dtype and one device")
        if self.relative_error is not None and not 0 <= self.relative_error < 1:
            raise ValueError(f"relative_error is from 0 to below 1, not {self.relative_error}")
        if self.merges and not self.adapters:
            raise ValueError("a quantizer that merges adapters takes adapters")


@dataclass(frozen=True)
class GivenConfig:
    """The options of a quantizer for which the caller gave a transformers config object.

    It stands where an instance of the backend's own `options` stands otherwise.

    Attributes:
        config: The object, of a class of transformers.
    """

    config: Any

    def to_dict(self) -> dict[str, Any]:
        """The fields of the object, and its class by name, for reports."""
        return {"config": type(self.config).__name__, **self.config.to_dict()}


def _as_it_is(model: PreTrainedModel) -> None:
    del model


def _anything(tensors: Tensors) -> list[str]:
    del tensors
    return []


@dataclass(frozen=True)
class Quantization:
    """How `from_pretrained` is to store a model's weights. Its functions are called in this order.

    Attributes:
        config: Is handed to `from_pretrained`; None: weights are read as the checkpoint has them.
        misfits: `misfits(tensors)` says why the tensors in a folder's files are not what the config
            says. `tensors` maps each name to its `StoredTensor`, by the files' headers, and is
            empty for a hub id. Reasons become a CheckpointError before anything is read; an empty
            list: they fit.
        reading: `reading()` is a context in which weights are read, the place for what a library
            prints or fetches meanwhile.
        finish: `finish(model)` is called once with the model that was read, in whose class, config
            and layers it may set right what the library left.
    """

    config: QuantizationConfigMixin | None
    misfits: Callable[[Tensors], list[str]] = _anything
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    finish: Callable[[PreTrainedModel], None] = _as_it_is


class Quantizer(Backend):
    """How weights are stored.

    A backend either quantizes while weights are read, or reads a checkpoint that was quantized:
    which of both is in `requirements.stored`. transformers does the reading; a backend names a
    config of it (`make_config`), and recognizes the layers it converted (`converted`).

    One with classes of its own brings three things, which no module needs before `make_config` or
    `reads`:

    1. A config: a `transformers.utils.quantization_config.QuantizationConfigMixin` with a
       `quant_method` of its own, and a `to_dict` of what a checkpoint must say of itself.
    2. A `transformers.quantizers.HfQuantizer` for it, which puts a layer of its own where each
       linear layer was as the weight comes from the file, and, where it reads quantized checkpoints
       too, says how their tensors become one (`get_weight_conversions`).
    3. The layer, an `nn.Module` with `in_features`, `out_features` and its weights as parameters or
       buffers on one device. It takes `[rows, in_features]` (and more dimensions before these) in
       the dtype of the plan, and returns `[rows, out_features]` in the same dtype, on the same
       device.

    Both classes are registered, under `quant_method`, in `make_config` and in `reads`, after
    which transformers looks them up: `register_quantization_config` and `register_quantizer` of
    `transformers.quantizers`. These raise where a name is taken, so register once.

    One that declares `tensor_parallel` is handed parts of matrices, as `Weight.linear` has them
    beside `Weight.whole`: some outputs of a layer, or some inputs, in one piece, which may be
    shorter in the last processes, or empty. It stores a part as it would within the whole, and
    `refuse` tells what cannot be cut so (`cut_groups`); what it keeps as it is it keeps in parts,
    too. While weights are read, a parameter of the model is a DTensor with the shape of the whole
    (`own_part`), and the weight that comes is the part. The layer that is put in its place has the
    sizes of the part and computes with it alone: jackfield adds outputs up over processes, gathers
    them and splits inputs around its `forward`. A bias is an attribute `bias` that is read in each
    call: where outputs are added up, one process keeps its numbers.

    Violations: every layer that `weight_bytes` counts as stored, and every one that `converted`
    knows, is checked after reading. It has to exist, to return the planned dtype, shape and
    device, and, where the file has its weights unquantized, to multiply as these do, within the
    error of 2 bits. What is not converted has to equal the file. All else is a PluginError that
    names the layer, or a CheckpointError where the checkpoint was quantized before. A model without
    a layer that `converted` knows is an error, too.

    Attributes:
        quantizes: Whether weights that are not quantized yet can be; False for one that only reads
            checkpoints.
        fields: What the fields of a checkpoint's `quantization_config` may be, by name (`Field`,
            `one_of` in `jackfield.contracts.checkpoint`). An odd value is reported as the file's
            fault.
    """

    kind: ClassVar[str] = "quantizer"
    bound: ClassVar[tuple[type, ...]] = (Quantization,)
    capabilities: ClassVar[QuantizerCapabilities]
    quantizes: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, Field]] = {}

    def native_operators(self) -> NativeOperators:
        """The operators of torch that its layers call and that are functions in C as well; by name.

        Asked when a model is bound whose steps are compiled.
        """
        return {}

    def reads(self, stored: Mapping[str, Any]) -> bool:
        """Whether a checkpoint, or a config object, with this `quantization_config` is its own.

        Asked when a plan is made. One with classes of its own registers them before it says yes.

        Args:
            stored: The dict of transformers' config, with `quant_method` in it. It comes out of a
                file: any value may be anything.
        """
        del stored
        return False

    def odd(self, requirements: Requirements) -> list[str]:
        """What of a checkpoint's `quantization_config` cannot be, as the file's fault.

        By `fields`; extend it for what depends on the job. One without fields is asked only where
        no quantizer with fields reads the checkpoint.

        Args:
            requirements: The job, before anything is chosen; `stored` is one that it `reads`.
        """
        return odd_fields(requirements.stored or {}, self.fields)

    def rank(self, requirements: Requirements) -> int | None:
        """``auto`` reads what is quantized already; it never quantizes.

        Args:
            requirements: The job; `stored` is what the checkpoint says of itself.
        """
        stored = requirements.stored
        return 10 if stored is not None and self.reads(stored) else None

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compare the job with `capabilities`; extend it for what those cannot express.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`, or a `GivenConfig`.

        Returns:
            Reasons against it; an empty list accepts.
        """
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
        """`capabilities.dtypes`; override it where these depend on the device or the options.

        Where no dtype is named and the model's own is not among these, the first of bfloat16,
        float16, float32, float64 that is among them is taken.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`, or a `GivenConfig`.
        """
        del requirements, options
        return self.capabilities.dtypes

    def relative_error(self, options: Any) -> float | None:
        """`capabilities.relative_error`; override it where that depends on the options.

        `jackfield check` holds the backend to it.

        Args:
            options: An instance of `options`, or a `GivenConfig`.
        """
        del options
        return self.capabilities.relative_error

    def _dtype(self, requirements: Requirements, options: Any) -> str | None:
        """The dtype of what is not quantized; None: the one that was asked for does not do."""
        can = self.dtypes(requirements, options)
        if requirements.dtype in can:
            return requirements.dtype
        return None if requirements.dtype_named else _order(can)[0]

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """The dtype (`dtypes`) and the size (`weight_bytes`) of what the other kinds will find.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`, or a `GivenConfig`.
        """
        dtype = self._dtype(requirements, options) or requirements.dtype
        chosen = replace(requirements, dtype=dtype)
        size = None if requirements.live else self.weight_bytes(chosen, options)
        return chosen if size is None else replace(chosen, weight_bytes=size)

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        """The bytes of all weights once they are loaded; None: unknown.

        `mixed_bytes` of `jackfield.contracts.quantizing` helps. It is also asked about one weight
        at a time: what takes another size than `plain_bytes` says is expected to be `converted`.

        Args:
            requirements: The job; `weights` are the parameters, `dtype` is that of those which stay
                as they are.
            options: An instance of `options`, or a `GivenConfig`.
        """
        del requirements, options
        return None

    def bind(self, context: BindContext) -> Quantization:
        """Return what `from_pretrained` is to be given. Called before weights are read.

        Args:
            context: `model` is None; `tokenizer` is there for one that measures a model on texts.
        """
        return Quantization(self.config_of(context))

    def impossible(self, requirements: Requirements) -> list[str]:
        """That several processes share the model, where it does not declare `tensor_parallel`, or
        that the model's code uses a layer's matrix by itself.

        Args:
            requirements: The job.
        """
        why = requirements.plain_matrices
        reasons = [f"stores matrices in forms of its own ({why})"] if why else []
        if self.capabilities.tensor_parallel:
            return reasons
        return reasons + one_process(requirements, "stores layers that are whole (tensor_parallel)")

    def config_of(self, context: BindContext) -> QuantizationConfigMixin | None:
        """The caller's own config, None for a checkpoint that has one, or `make_config`.

        Args:
            context: As for `bind`.
        """
        if isinstance(context.options, GivenConfig):
            return context.options.config  # type: ignore[no-any-return]
        needs: Requirements | None = context.requirements
        stored = needs is not None and needs.stored is not None
        return None if stored else self.make_config(context)

    @abstractmethod
    def make_config(self, context: BindContext) -> QuantizationConfigMixin | None:
        """Make the transformers config that quantizes while weights are read.

        One with classes of its own registers them first.

        Args:
            context: `model` is None; `config` and `requirements` are None too where plain
                transformers code asks (`jackfield.quantization`).

        Returns:
            The config; None: nothing is quantized.
        """

    @abstractmethod
    def converted(self, module: nn.Module) -> bool:
        """Whether a module has its weights stored by this quantizer: by its class, mostly.

        Args:
            module: Any module of a loaded model.
        """

    def runs_on(self, module: nn.Module) -> str | None:
        """Which kernel a converted `module` runs on, or what it waits for, for reports.

        None where there is nothing to report.

        Args:
            module: One for which `converted` said yes.
        """
        del module
        return None

    def extra_tensors(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """What a module holds of its weights beside its parameters and buffers: scales, tables.

        Asked for every module of a loaded model, when its bytes are counted. Parts of tensor
        subclasses (`__tensor_flatten__`) are found without it.

        Args:
            module: Any module; only what it holds itself, and none inside of it.

        Returns:
            The tensors; by default none.
        """
        del module
        return ()

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


def cut_groups(requirements: Requirements, group_size: int) -> list[str]:
    """Why processes that share the model would cut groups of neighbouring inputs, by one layer.

    Empty: none is cut. A layer has groups where `group_size` divides the inputs of the whole.
    """
    for weight in requirements.weights:
        if weight.whole is None or weight.linear is None or weight.whole[1] % group_size:
            continue
        if (own := weight.linear[1]) % group_size:
            layer, inputs = weight.name.removesuffix(".weight"), weight.whole[1]
            why = f"has groups of {group_size} inputs, and tp_size={requirements.tp_size} cuts one"
            what = f"each process has {own} of the {inputs} inputs of {layer}"
            return [f"{why}: {what}; take a group size that divides {own}, or another tp_size"]
    return []


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this process has of a parameter, where several share the model; elsewhere all of it.

    For a quantizer that puts a layer in place of a linear one, while weights are read.
    """
    local = getattr(parameter, "to_local", None)
    return parameter if local is None else local()


def in_force(requirements: Requirements, options: Any) -> Mapping[str, Any] | None:
    """The transformers config that decides, as a dict; None: `options` do."""
    if requirements.stored is not None:
        return requirements.stored
    return options.config.to_dict() if isinstance(options, GivenConfig) else None


def _number_bytes(dtype: str | None, requirements: Requirements) -> int:
    return BYTES[dtype or requirements.dtype]


def _order(dtypes: frozenset[str]) -> list[str]:
    return [dtype for dtype in PREFERRED if dtype in dtypes]
