"""``gptq``: weights in 2 to 8 bits, rounded so that a layer's outputs change least."""

from __future__ import annotations

import copy
import functools
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    GivenConfig,
    Quantization,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
    Weight,
)
from jackfield.contracts.checkpoint import FLAG, Field, Tensors, one_of
from jackfield.contracts.quantizing import in_force, mixed_bytes
from jackfield.errors import UsageError
from jackfield_plugins.quantizer.calibration import plain_texts, windows
from jackfield_plugins.quantizer.gptq_files import BITS, layer_forms, misfits
from jackfield_plugins.quantizer.libraries import missing

if TYPE_CHECKING:
    from torch import nn
    from transformers import GPTQConfig

#: Where optimum looks for a model's layers; what lies elsewhere stays as it is.
BLOCKS = ("transformer.h.", "model.decoder.layers.", "gpt_neox.layers.", "model.layers.")

#: What `pack_block` of gptqmodel wants rows and columns to be multiples of.
WORD = 32

#: Its default choice on a CPU repacks weights in the first step, so that they cannot be saved.
CPU_KERNEL = "gptq_torch"

#: of a layer's outputs by bits, measured in groups of 32: 0.57, 0.25, 0.12 and 0.007
ERRORS = {2: 0.75, 3: 0.4, 4: 0.2, 8: 0.014}

#: tokens of a piece of calibration text, at most
LENGTH = 512


@dataclass(frozen=True)
class Options:
    """Weights of `bits` in groups of `group_size` numbers of a row; -1: a whole row is one group.

    `desc_act` quantizes columns in the order of their activations, `symmetric` needs no zero
    points. Activations are those on `samples` pieces of 512 tokens of the UTF-8 file
    `calibration`, by default of the texts that the demo model learned from. `damp_percent` of the
    Hessian's mean is added to its diagonal.
    """

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int = 32
    desc_act: bool = False
    symmetric: bool = True
    damp_percent: float = 0.1
    samples: int = 16
    calibration: str | None = None

    def __post_init__(self) -> None:
        if self.group_size not in (-1, 16, 32, 64, 128, 256, 512, 1024):
            known = "-1, 16, 32, 64, 128, 256, 512 or 1024"
            raise ValueError(f"group_size must be {known}, not {self.group_size}")
        if not 0 < self.damp_percent < 1:
            raise ValueError(f"damp_percent must be between 0 and 1, not {self.damp_percent}")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, not {self.samples}")
        if self.calibration is not None and not Path(self.calibration).is_file():
            raise ValueError(f"calibration={self.calibration} is not a file")


_FORMAT = one_of("gptq", "gptq_v2", "marlin", "bitblas", None)


class Gptq(Quantizer):
    """Column by column, each column's rounding errors made up for in those that follow (Frantar
    et al. 2023, arXiv:2210.17323), by gptqmodel through transformers and optimum.

    Reads checkpoints of that format, whoever made them.
    """

    name = "gptq"
    options = Options
    fields: ClassVar[Mapping[str, Field]] = {
        "bits": one_of(*BITS, needed=True),
        "group_size": Field(
            lambda size: type(size) is int and (size > 0 or size == -1), "-1 or a number above 0"
        ),
        "checkpoint_format": _FORMAT,
        "desc_act": FLAG,
        "format": _FORMAT,
        "sym": FLAG,
        "dynamic": Field(lambda given: given is None or isinstance(given, dict), "an object"),
        "modules_in_block_to_quantize": Field(
            lambda given: given is None or isinstance(given, list), "a list"
        ),
    }
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16", "float16", "float32"}), devices=frozenset({"cpu", "cuda"})
    )

    def available(self) -> list[str]:
        return missing("gptq", "gptqmodel", "optimum", "accelerate")

    def relative_error(self, options: Any) -> float | None:
        """Of outputs for inputs that are like no text, for which nothing was made up for."""
        return None if isinstance(options, GivenConfig) else ERRORS[options.bits]

    def reads(self, stored: Mapping[str, Any]) -> bool:
        return stored.get("quant_method") == "gptq"

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if requirements.stored is not None:
            return reasons
        if not isinstance(options, GivenConfig):
            return [*reasons, *_misfits(requirements, options.group_size)]
        return [*reasons, *_misfits_of_config(requirements, options.config)]

    def bind(self, context: BindContext) -> Quantization:
        from jackfield_plugins.quantizer.gptqmodel import finish, import_gptqmodel, reading

        import_gptqmodel()
        needs: Requirements | None = context.requirements
        config: Any = self.config_of(context)
        stored = None if needs is None else needs.stored
        if needs is not None and needs.device == "cpu":
            if stored is not None and config is None:
                config = _on_cpu(stored)
            elif getattr(config, "backend", None) == "auto":
                config = copy.copy(config)  # the caller's own stays as it is
                config.backend = CPU_KERNEL
        return Quantization(config, functools.partial(_misfits_of, needs), reading, finish)

    def make_config(self, context: BindContext) -> GPTQConfig:
        from transformers import GPTQConfig

        options = context.options
        needs: Requirements | None = context.requirements
        on_cpu = needs is not None and needs.device == "cpu"
        return GPTQConfig(
            bits=options.bits,
            group_size=options.group_size,
            desc_act=options.desc_act,
            act_group_aware=not options.desc_act and options.group_size != -1,
            sym=options.symmetric,
            damp_percent=options.damp_percent,
            backend=CPU_KERNEL if on_cpu else None,
            dataset=_dataset(context),
            tokenizer=context.tokenizer,
        )

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        told = _format(in_force(requirements, options), options)
        if told is None:
            return None
        layers = {w.name.removesuffix(".weight") for w in filter(_converts, requirements.weights)}

        def size(weight: Weight) -> int | None:
            path, _, own = weight.name.rpartition(".")
            if path not in layers:
                return None
            return _bytes(weight, told) if own == "weight" else 2 * weight.numbers

        return mixed_bytes(requirements, size)

    def converted(self, module: nn.Module) -> bool:
        return hasattr(module, "qweight") and type(module).__module__.startswith("gptqmodel.")

    def runs_on(self, module: nn.Module) -> str:
        """gptqmodel chooses a kernel by what it can compile."""
        kernel = f"by {type(module).__name__} of gptqmodel"
        weight: Any = module.qweight
        if weight.device.type != "cuda" or _has_nvcc():
            return kernel
        return f"{kernel} (no nvcc is here to compile its faster kernels with)"


def _has_nvcc() -> bool:
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("nvcc") is not None or CUDA_HOME is not None


def _dataset(context: BindContext) -> list[Any]:
    """Texts where transformers has yet to find the tokenizer; otherwise tokens."""
    options = context.options
    needs: Requirements | None = context.requirements
    if needs is None:
        return plain_texts(options.calibration, options.samples * 8)
    if context.tokenizer is None:
        raise UsageError(
            "quantizer 'gptq' measures a model on texts, and this one has no tokenizer: give "
            "tokenizer=…, or a folder with a tokenizer.json"
        )
    length = min(LENGTH, needs.context_length or LENGTH)
    return windows(options.calibration, context.tokenizer, options.samples, length)


def _on_cpu(stored: Mapping[str, Any]) -> GPTQConfig:
    from transformers import GPTQConfig

    return GPTQConfig(bits=stored["bits"], backend=CPU_KERNEL)


def _format(config: Mapping[str, Any] | None, options: Any) -> tuple[int, int] | None:
    """Bits and group size; None where layers may differ in them."""
    if config is None:
        return options.bits, options.group_size
    if config.get("modules_in_block_to_quantize") or config.get("dynamic"):
        return None
    return config["bits"], config.get("group_size", 128)


def _converts(weight: Weight) -> bool:
    return weight.linear is not None and weight.name.startswith(BLOCKS)


def _misfits_of_config(requirements: Requirements, config: Any) -> list[str]:
    """Why a caller's `GPTQConfig` cannot be followed; sizes, where all layers have the same."""
    found = []
    if config.group_size == -1 and config.act_group_aware:
        found.append(
            "orders groups of columns (act_group_aware), and group_size=-1 makes none; write "
            "act_group_aware=False"
        )
    if config.dataset is None:
        found.append("measures a model on texts, and the config has none; write dataset=[…]")
    if _format(config.to_dict(), None) is None:
        return found
    return [*_misfits(requirements, config.group_size), *found]


def _misfits(requirements: Requirements, group_size: int) -> list[str]:
    layers = [weight for weight in requirements.weights if _converts(weight)]
    if requirements.weights and not layers:
        where = ", ".join(BLOCKS)
        return [f"finds no layers in {requirements.architecture}: looks in {where}"]
    for weight in layers:
        out_features, in_features = weight.linear or (0, 0)
        if out_features % WORD or in_features % WORD:
            shape = f"{out_features} × {in_features}"
            return [f"packs rows and columns in {WORD}s, and {weight.name} is {shape}"]
        if group_size > 0 and in_features % group_size:
            better = math.gcd(in_features, group_size)
            where = f"{in_features} columns of {weight.name}"
            return [f"groups of {group_size} do not divide {where}; write 'group_size={better}'"]
    return []


def _bytes(weight: Weight, told: tuple[int, int]) -> int:
    forms = layer_forms(weight.linear or (0, 0), *told)
    return sum(math.prod(f.shape) * (2 if name == "scales" else 4) for name, f in forms.items())


def _misfits_of(needs: Requirements | None, tensors: Tensors) -> list[str]:
    """Compares the headers of a checkpoint's files with what its config says."""
    if needs is None or needs.stored is None:
        return []
    layers = {
        weight.name.removesuffix(".weight"): weight.linear or (0, 0)
        for weight in filter(_converts, needs.weights)
    }
    return misfits(layers, _format(needs.stored, None), tensors)


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Gptq()]
