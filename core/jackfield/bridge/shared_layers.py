"""What processes do with one another around the layers that a quantizer has put in place.

transformers installs its collectives on a model's modules before weights are read, so they are gone
with the linear layers that a quantizer replaces. The same is done here around the new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import pad

from jackfield.bridge.sharding import Around, Shard, around, replaced
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

    from jackfield.contracts import Weight


def connect(
    model: PreTrainedModel, expected: PreTrainedModel, weights: Iterable[Weight], shard: Shard
) -> None:
    """Have the layers of `model` that are not those of `expected` take and return what these would.

    Torch has a process group of the shard's size. Raises ExecutionError, in all processes.
    """
    outputs = {
        weight.name.removesuffix(".weight"): (weight.whole or weight.linear)[0]
        for weight in weights
        if weight.linear is not None
    }
    for path, module, _ in list(replaced(model, expected)):
        does = around(model, path, shard)
        if does is None or (does.gathered and path not in outputs):
            raise ExecutionError(
                f"{path} of {type(model).__name__} was replaced by a {type(module).__name__}, "
                "around which jackfield cannot do what transformers' tensor parallel plan does; "
                "load it in one process"
            )
        if any(does):
            _surround(module, does, shard, outputs.get(path, 0))
        if does.summed and shard.rank:
            _leave_out_bias(module)


def _surround(module: nn.Module, does: Around, shard: Shard, outputs: int) -> None:
    inner = module.forward

    def forward(given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = inner(_own(given, shard) if does.split else given)
        if does.summed:
            out = out.contiguous()
            dist.all_reduce(out)
        return _gathered(out, outputs, shard) if does.gathered else out

    module.forward = forward


def _own(given: torch.Tensor, shard: Shard) -> torch.Tensor:
    """This process's part of the last dimension."""
    width = given.shape[-1]
    return given.narrow(-1, shard.begin(width), shard.part(width)).contiguous()


def _gathered(out: torch.Tensor, width: int, shard: Shard) -> torch.Tensor:
    """What all processes have of the last dimension, `width` of it; the last ones have less."""
    each = Shard(shard.size, 0).part(width)
    own = pad(out, (0, each - out.shape[-1])).contiguous()
    parts = [torch.empty_like(own) for _ in range(shard.size)]
    dist.all_gather(parts, own)
    return torch.cat(parts, -1)[..., :width]


def _leave_out_bias(module: Any) -> None:
    """A sum over processes has one bias, that of the first."""
    if getattr(module, "bias", None) is not None:
        module.bias.data = torch.zeros_like(module.bias)
