"""What `bnb-8bit` and `bnb-4bit` have in common."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts import (
    BindContext,
    GivenConfig,
    Quantization,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
    Weight,
)
from jackfield.contracts.checkpoint import FLAG, NAMES, Field, Tensors, one_of
from jackfield.contracts.quantizing import in_force, mixed_bytes
from jackfield_plugins.quantizer.bnb_files import STORAGES
from jackfield_plugins.quantizer.libraries import import_bitsandbytes, missing

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


OFFLOAD = "llm_int8_enable_fp32_cpu_offload"
_ALL_WHOLE = "leaves what lies on the CPU as it is, and here that is all of it"


def _is_threshold(given: Any) -> bool:
    return type(given) in (int, float) and 0 <= given < float("inf")


class BitsAndBytes(Quantizer):
    """One of bitsandbytes' linear layers in place of torch's, through `BitsAndBytesConfig`."""

    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16", "float16", "float32"}), devices=frozenset({"cpu", "cuda"})
    )
    #: the field of a `BitsAndBytesConfig` that chooses this one of the two
    chosen_by: ClassVar[str]
    layer: ClassVar[str]
    fields: ClassVar[Mapping[str, Field]] = {
        "load_in_4bit": FLAG,
        "load_in_8bit": FLAG,
        "llm_int8_threshold": Field(_is_threshold, "a number of 0 or more"),
        "llm_int8_skip_modules": NAMES,
        OFFLOAD: FLAG,
        "llm_int8_has_fp16_weight": FLAG,
        "bnb_4bit_compute_dtype": one_of(None, "bfloat16", "float16", "float32"),
        "bnb_4bit_quant_type": one_of("fp4", "nf4"),
        "bnb_4bit_use_double_quant": FLAG,
        "bnb_4bit_quant_storage": one_of(None, *STORAGES),
    }

    def available(self) -> list[str]:
        return missing("bnb", "bitsandbytes", "accelerate")

    def reads(self, stored: Mapping[str, Any]) -> bool:
        return bool(stored.get(self.chosen_by))

    def odd(self, requirements: Requirements) -> list[str]:
        found, stored = super().odd(requirements), requirements.stored or {}
        if not found and stored.get(OFFLOAD) and requirements.device == "cpu":
            found.append(f"{OFFLOAD} is True, which {_ALL_WHOLE}; set it to false, or use a GPU")
        return found

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        given = isinstance(options, GivenConfig) or options != self.options()
        if requirements.stored is not None and given:
            reasons.append("the checkpoint is quantized already; leave the options out")
        config = options.config.to_dict() if isinstance(options, GivenConfig) else {}
        if config.get(OFFLOAD) and requirements.device == "cpu":
            reasons.append(f"{OFFLOAD}=True {_ALL_WHOLE}; drop it")
        if requirements.weights and not any(w.linear for w in requirements.weights):
            name = requirements.architecture
            reasons.append(f"converts nn.Linear and Conv1D, and {name} has none but its head")
        return reasons

    def bind(self, context: BindContext) -> Quantization:
        import_bitsandbytes()
        needs: Requirements | None = context.requirements
        misfits = functools.partial(self.misfits, needs)
        return Quantization(self.config_of(context), misfits, finish=self.finish)

    def misfits(self, needs: Requirements | None, tensors: Tensors) -> list[str]:
        """Why a checkpoint's files are not what its config says; nothing for one that is whole."""
        if needs is None or needs.stored is None:
            return []
        return self.in_files(needs, needs.stored, tensors)

    @abstractmethod
    def in_files(
        self, needs: Requirements, stored: Mapping[str, Any], tensors: Tensors
    ) -> list[str]: ...

    def finish(self, model: PreTrainedModel) -> None:
        del model

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        config = in_force(requirements, options)
        if config is not None and config.get("llm_int8_skip_modules"):
            return None  # then transformers converts other layers than those that are noted here
        convert = self.convert(config, options)
        return mixed_bytes(requirements, lambda w: None if w.linear is None else convert(w))

    @abstractmethod
    def convert(
        self, config: Mapping[str, Any] | None, options: Any
    ) -> Callable[[Weight], int | None]:
        """What the matrix of a linear layer takes; None: it stays as it is."""

    def converted(self, module: nn.Module) -> bool:
        kind = type(module)
        return kind.__name__ == self.layer and kind.__module__.startswith("bitsandbytes.")

    def extra_tensors(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Its scales and tables are plain attributes, of weights and of a layer that has run."""
        yield from _tensors_in(getattr(module, "state", None))  # of 8 bits, once it has run
        for weight in module.parameters(recurse=False):
            yield from _tensors_in(weight)  # of 8 bits
            state = getattr(weight, "quant_state", None)  # of 4 bits
            yield from (*_tensors_in(state), *_tensors_in(getattr(state, "state2", None)))


def _tensors_in(owner: object) -> Iterator[torch.Tensor]:
    """The tensors that are plain attributes of `owner`."""
    import torch

    held = vars(owner).values() if hasattr(owner, "__dict__") else ()
    yield from (value for value in held if isinstance(value, torch.Tensor))
