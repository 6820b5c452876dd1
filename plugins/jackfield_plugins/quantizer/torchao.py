"""``torchao``: weights in 8 or 4 bits as tensor subclasses of torchao."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jackfield import hookimpl
from jackfield.contracts import (
    TORCHAO,
    BindContext,
    GivenConfig,
    Quantization,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
    Weight,
    quieted,
)
from jackfield.contracts.checkpoint import FLAG, NAMES, Field
from jackfield.contracts.quantizing import in_force, mixed_bytes
from jackfield.contracts.requirements import BYTES
from jackfield_plugins.devices import capabilities
from jackfield_plugins.quantizer.libraries import missing
from jackfield_plugins.quantizer.torchao_files import misfits

if TYPE_CHECKING:
    from torch import nn
    from transformers import TorchAoConfig

INT4, INT8, DYNAMIC = "int4-weight-only", "int8-weight-only", "int8-dynamic"

#: numbers that may share a scale in 4 bits (`Int4OpaqueTensor`, `Int4TilePackedTo4dTensor`)
GROUPS = {"cpu": (32, 64, 128), "cuda": (32, 64, 128, 256)}
GROUP_SIZE = 32

#: of a layer's outputs, measured: at most 0.010, 0.012 (0.02 where weights have 7 bits) and 0.1
ERRORS = {INT8: 0.012, DYNAMIC: 0.022, INT4: 0.12}

#: what the kernel for CUDA wants (tinygemm): rows and columns are padded to multiples of these
CUDA_ROWS, CUDA_COLUMNS, CUDA_CAPABILITY = 8, 1024, (8, 0)

#: the kernel for the CPU computes rows of weights in blocks of these
CPU_ROWS = 16

#: the class of a torchao config -> our type; of others nobody tells the size before it is there
TYPES = {
    "Int4WeightOnlyConfig": INT4,
    "PrototypeInt4WeightOnlyConfig": INT4,
    "Int8DynamicActivationInt8WeightConfig": DYNAMIC,
    "Int8WeightOnlyConfig": INT8,
}


@dataclass(frozen=True)
class Options:
    """Weights of `type`; `group_size` numbers of a row share a scale.

    None: 32 in 4 bits, a whole row in 8 bits. int8-dynamic rounds activations to 8 bits too, a
    scale for each token, and has a scale for a whole row of weights only.
    """

    type: Literal["int8-weight-only", "int4-weight-only", "int8-dynamic"] = "int8-weight-only"
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.group_size is None:
            return
        if self.type == DYNAMIC:
            raise ValueError("int8-dynamic has one scale a row; leave group_size out")
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, not {self.group_size}")
        if self.type == INT4 and self.group_size not in GROUPS["cuda"]:
            known = ", ".join(map(str, GROUPS["cuda"]))
            raise ValueError(f"group_size of int4 must be one of {known}, not {self.group_size}")


@dataclass(frozen=True)
class _Format:
    type: str
    group_size: int | None

    @classmethod
    def of(cls, options: Options) -> _Format:
        size = options.group_size
        return cls(options.type, GROUP_SIZE if size is None and options.type == INT4 else size)


def _is_type(given: Any) -> bool:
    told = given.get("default") if isinstance(given, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("_type"), str):
        return False
    data = told.get("_data", {})
    if not isinstance(data, dict) or not _is_size(data.get("group_size")):
        return False
    kind = data.get("granularity")
    if not isinstance(kind, dict):
        return kind is None or isinstance(kind, list)  # of activations and of weights
    rows = kind.get("_data")
    return (isinstance(kind.get("_type"), str) and isinstance(rows, dict)) and (
        kind["_type"] != "PerGroup"
        or (type(rows.get("group_size")) is int and rows["group_size"] > 0)
    )


def _is_size(given: Any) -> bool:
    return given is None or (type(given) is int and given > 0)


class TorchAo(Quantizer):
    """Affine quantization by rows or groups, as torchao does it.

    In 4 bits, weights are packed for the processor that they are on: the plain layouts of torchao
    run on no CPU, and that for CUDA wants bfloat16.
    """

    name = "torchao"
    options = Options
    fields: ClassVar[Mapping[str, Field]] = {
        "quant_type": Field(
            _is_type, "an object with 'default', an object with _type and _data", needed=True
        ),
        "modules_to_not_convert": NAMES,
        "include_input_output_embeddings": FLAG,
        "untie_embedding_weights": FLAG,
    }
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16", "float16", "float32"}), devices=frozenset({"cpu", "cuda"})
    )

    def available(self) -> list[str]:
        return missing("torchao", "torchao", "accelerate")

    def reads(self, stored: Mapping[str, Any]) -> bool:
        return stored.get("quant_method") == "torchao"

    def dtypes(self, requirements: Requirements, options: Any) -> frozenset[str]:
        told = _format(requirements, options)
        if told is not None and told.type == INT4 and requirements.device == "cuda":
            return frozenset({"bfloat16"})
        return self.capabilities.dtypes

    def relative_error(self, options: Any) -> float | None:
        return None if isinstance(options, GivenConfig) else ERRORS[options.type]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if requirements.stored is not None:
            return reasons + _beside(requirements.stored, options)
        if joined := requirements.joined_weights:
            reasons.append(
                f"gets only the first of the weights that {joined} is, where transformers reads "
                "and converts a checkpoint of this model"
            )
        told = _format(requirements, options)
        if told is None or isinstance(options, GivenConfig):
            return reasons
        return [*reasons, *_misfits(requirements, told), *_too_old(requirements, told)]

    def bind(self, context: BindContext) -> Quantization:
        needs: Requirements | None = context.requirements
        with quieted(*TORCHAO):
            return Quantization(self.config_of(context), functools.partial(misfits, needs))

    def make_config(self, context: BindContext) -> TorchAoConfig:
        from transformers import TorchAoConfig

        needs: Requirements | None = context.requirements
        device = None if needs is None else needs.device
        return TorchAoConfig(_torchao_config(_Format.of(context.options), device or _device()))

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        told = _format(requirements, options)
        if told is None:
            return None
        device = requirements.device or "cpu"
        number = BYTES[requirements.dtype]
        return mixed_bytes(requirements, lambda weight: _size(weight, told, device, number))

    def converted(self, module: nn.Module) -> bool:
        return type(getattr(module, "weight", None)).__module__.startswith("torchao.")


def _beside(stored: Mapping[str, Any], options: Any) -> list[str]:
    """What is wrong with a checkpoint's config, and with a second one for it."""
    reasons = []
    if isinstance(options, GivenConfig) or options != Options():
        reasons.append("the checkpoint is quantized already; leave the options out")
    return reasons


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _torchao_config(told: _Format, device: str) -> Any:
    """The config object of torchao; none of them may set the process's options of inductor."""
    from torchao import quantization as ao

    if told.type == DYNAMIC:
        import torch
        from torchao.utils import should_reduce_range

        return ao.Int8DynamicActivationInt8WeightConfig(
            set_inductor_config=False, reduce_range=should_reduce_range(torch.device(device))
        )
    if told.type == INT8:
        size = told.group_size
        scaled = ao.PerRow() if size is None else ao.PerGroup(size)
        return ao.Int8WeightOnlyConfig(granularity=scaled, set_inductor_config=False)
    assert told.group_size is not None  # `_Format.of` chooses one
    if device == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(told.group_size, set_inductor_config=False)
    return ao.Int4WeightOnlyConfig(
        group_size=told.group_size,
        int4_packing_format="tile_packed_to_4d",
        set_inductor_config=False,
    )


def _format(requirements: Requirements, options: Any) -> _Format | None:
    """What layers are stored as; None for a config of torchao's that is not among ours."""
    config = in_force(requirements, options)
    if config is None:
        return _Format.of(options)
    told = config.get("quant_type", {}).get("default", {})
    plain = not config.get("modules_to_not_convert") and not config.get(
        "include_input_output_embeddings"
    )
    kind, data = TYPES.get(told.get("_type", "")), told.get("_data", {})
    if kind is None or not plain:
        return None
    if kind == INT4:
        return _Format(kind, data.get("group_size", 128))
    granularity = data.get("granularity") or {}
    name = granularity.get("_type") if isinstance(granularity, dict) else None
    if name == "PerGroup":
        return _Format(kind, granularity["_data"]["group_size"])
    return _Format(kind, None) if name == "PerRow" else None


def _converts(weight: Weight) -> bool:
    return weight.linear is not None and not weight.transposed  # it knows `nn.Linear` only


def _misfits(requirements: Requirements, told: _Format) -> list[str]:
    """The layers that torchao would leave as they are, without a word, or fail on."""
    size, device = told.group_size, requirements.device or "cpu"
    if told.type == INT4 and size not in GROUPS.get(device, ()):
        known = ", ".join(map(str, GROUPS.get(device, ())))
        return [f"int4 on {device} has groups of {known}, not of {size}"]
    layers = list(filter(_converts, requirements.weights))
    if requirements.weights and not layers:
        return [f"converts nn.Linear, and {requirements.architecture} has none but its head"]
    for weight in layers:
        out_features, in_features = weight.linear or (0, 0)
        if size is not None and in_features % size:
            better = math.gcd(in_features, size)
            hint = f"; write 'group_size={better}'" if told.type == INT8 else ""
            return [f"groups of {size} do not divide {in_features} columns of {weight.name}{hint}"]
        if told.type == INT4 and device == "cpu" and out_features % CPU_ROWS:
            return [f"int4 on cpu has rows in {CPU_ROWS}s, and {weight.name} has {out_features}"]
    return []


def _too_old(requirements: Requirements, told: _Format) -> list[str]:
    if told.type != INT4 or requirements.device != "cuda":
        return []
    if min(capabilities(requirements), default=CUDA_CAPABILITY) >= CUDA_CAPABILITY:
        return []
    return ["int4 on cuda needs tensor cores of compute capability 8.0 (Ampere) or later"]


def _size(weight: Weight, told: _Format, device: str, number: int) -> int | None:
    """Bytes of one matrix. In 8 bits a scale is a float32 with an int8 zero point beside it; in 4
    bits both are of the model's dtype.
    """
    if not _converts(weight) or weight.linear is None:
        return None
    out_features, in_features = weight.linear
    if told.type == INT4 and device != "cpu":
        out_features = _up(out_features, CUDA_ROWS)
        in_features = _up(in_features, CUDA_COLUMNS)
    scales = out_features * in_features // (told.group_size or in_features)
    if told.type == INT4:
        return out_features * in_features // 2 + scales * 2 * number
    return out_features * in_features + scales * 5


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [TorchAo()]
