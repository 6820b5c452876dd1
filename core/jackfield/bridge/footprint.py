"""What the weights of a model are: planned by a meta model, and measured, once they are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from jackfield.contracts.requirements import Weight
from jackfield.errors import ExecutionError
from jackfield.registry.backends import Registered

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def joined_weights(meta_model: PreTrainedModel) -> str | None:
    """The name of a tensor in checkpoints that is several weights of the model; None: all match."""
    for conversion in get_model_conversion_mapping(meta_model):
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            return str(conversion.source_patterns[0])
    return None


def weights_of(meta_model: PreTrainedModel) -> tuple[Weight, ...]:
    """Every weight of a model on the meta device, each once, however often it is used.

    Which linear layers stay as they are (the output head, what is tied) is transformers' own
    choice, which the quantizers in it follow.
    """
    kept = tuple(get_keys_to_not_convert(meta_model))
    wide = tuple(getattr(meta_model, "_keep_in_fp32_modules_strict", None) or ())
    found = []
    for name, parameter in meta_model.named_parameters():
        path, _, own = name.rpartition(".")
        module = meta_model.get_submodule(path)
        quantizable = own == "weight" and not _is_kept(path, kept)
        linear = _linear_shape(module) if quantizable else None
        dtype = "float32" if any(part in name for part in wide) else None
        transposed = isinstance(module, Conv1D)
        found.append(Weight(name, parameter.numel(), linear, dtype, transposed))
    for name, buffer in _saved_buffers(meta_model):
        dtype = "float32" if any(part in name for part in wide) else None
        found.append(Weight(name, buffer.numel(), None, dtype))
    return tuple(found)


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint holds beside parameters: corrections of a router's scores, and the like."""
    for path, module in model.named_modules():
        for own, buffer in module._buffers.items():
            kept = own not in module._non_persistent_buffers_set
            if kept and buffer is not None and buffer.is_floating_point():
                yield f"{path}.{own}", buffer


def head_of(model: PreTrainedModel) -> tuple[int, int] | None:
    """`(out_features, in_features)` of the output head; None where it is no plain linear layer."""
    head: Any = model.get_output_embeddings()
    return _linear_shape(head) if type(head) is nn.Linear else None


def numbers_of_a_token(model: PreTrainedModel) -> int:
    """About how many numbers a layer makes of one token at the same time, at most.

    What the linear layers of one module make and what is computed from it, the residual stream, and
    a norm of it in float32. Of experts those that a token is given to.
    """
    text = model.config.get_text_config(decoder=True)
    hidden, head = int(getattr(text, "hidden_size", 0)) or 1, model.get_output_embeddings()
    active = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k", None)
    experts = active if isinstance(active, int) else 1
    widest = 0
    for module in model.modules():
        made = sum(_width(child) for child in module.children() if child is not head)
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        made += experts * sum(hidden + 2 * (p.shape[1] * p.shape[2] // hidden) for p in stacked)
        widest = max(widest, made)
    return 2 * widest + 8 * hidden


def _width(module: nn.Module) -> int:
    """How many numbers a linear layer makes of a token, in whatever way its weight is stored."""
    width = getattr(module, "out_features", getattr(module, "nf", 0))
    return width if isinstance(width, int) else 0


def head_is_tied(model: PreTrainedModel) -> bool:
    """Whether the output head and the embedding have one weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", head)


def _is_kept(path: str, kept: tuple[str, ...]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in kept)


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    if type(module) is nn.Linear:
        return module.out_features, module.in_features
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    return None


def loaded_bytes(model: PreTrainedModel, quantizer: Registered | None = None) -> int:
    """What the weights of a loaded model take in memory, scales and tables of `quantizer` included.

    Tensors that share memory count once; what lies on disk counts nothing.
    """
    tensors = (t for module in model.modules() for t in tensors_of(module, quantizer))
    # Not by storage: what transformers reads without a copy is a view into the whole file.
    held = {(t.data_ptr(), t.nbytes) for t in tensors if t.device.type != "meta"}
    return sum(size for _, size in held)


def tensors_of(module: nn.Module, quantizer: Registered | None = None) -> Iterator[torch.Tensor]:
    """What a module itself, and none inside of it, holds in memory of its weights."""
    passing = {id(module._buffers[name]) for name in module._non_persistent_buffers_set}
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and id(tensor) not in passing:
            yield from _parts(tensor)
    if quantizer is not None:
        yield from quantizer.ask("extra_tensors", module)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor is made of: one of a class of its own holds others."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor has its mesh of devices, too
                yield from _parts(part)
        return
    yield tensor


def stored_quantization(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The `quantization_config` of what is quantized already; None: it is not."""
    for part in (config, config.get_text_config(decoder=True)):
        if (found := getattr(part, "quantization_config", None)) is not None:
            return dict(found) if isinstance(found, dict) else dict(found.to_dict())
    return None


def stored_as(model: PreTrainedModel, quantizer: Registered) -> str | None:
    """What `quantizer` was found to have done to a loaded model; None for one as it always was.

    And what the layers run on, where it tells.

    Raises ExecutionError where it did nothing.
    """
    if stored_quantization(model.config) is None:
        return None
    modules = [module for module in model.modules() if quantizer.ask("converted", module)]
    converted = set(map(id, modules))
    linear = {
        id(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name
    }
    if not converted:
        raise ExecutionError(
            f"{quantizer} converted none of the {len(linear)} linear layers of "
            f"{type(model).__name__}; load it without quantization"
        )
    counts = Counter(quantizer.ask("runs_on", module) for module in modules)
    del counts[None]
    kernels = (
        what if count == len(modules) else f"{count} {what}" for what, count in counts.items()
    )
    return ", ".join([f"{len(converted)} of {len(linear | converted)} linear layers", *kernels])
