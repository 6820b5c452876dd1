"""The layers of a model with several LoRAs beside them, one or none for each token of a step.

The matrices of all adapters stand below each other, so that a layer takes two products however many
adapters a step has: what a token's own adapter did not ask for is set to zero between the two.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jackfield.bridge.lora import Matrices
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from jackfield.bridge.sharding import Shard

#: The rank of each adapter in one layer, by slot; 0 where it leaves the layer alone.
Ranks = tuple[int, ...]


class Part(NamedTuple):
    """What of a layer's stack a step needs: rows from `start` to `stop`, and who may see which.

    `mask` is bool `[rows, width or 1, stop - start]`; None: every token sees all of them.
    """

    start: int
    stop: int
    mask: torch.Tensor | None


class Stack:
    """One layer's matrices of all adapters, and how it adds what they say to its output."""

    def __init__(self, name: str, module: nn.Module, layers: LoraLayers) -> None:
        self.name = name
        self.ranks: Ranks = ()
        self.calls = 0
        self._a: torch.Tensor  # [ranks, inputs]
        self._b: torch.Tensor  # [ranks, outputs]
        self._layers = layers
        self._handle = module.register_forward_hook(self._add)

    def build(self, parts: Sequence[Matrices | None]) -> list[Matrices | None]:
        """Hold these matrices, one for each slot; returns them as views of what is held."""
        there = [part for part in parts if part is not None]
        self._a = torch.cat([part.a for part in there])
        self._b = torch.cat([part.b for part in there])
        self.ranks = tuple(0 if part is None else len(part.a) for part in parts)
        cuts = [n for n in self.ranks if n]
        views = iter(zip(self._a.split(cuts), self._b.split(cuts), strict=True))
        return [None if part is None else Matrices(*next(views)) for part in parts]

    def remove(self) -> None:
        self._handle.remove()

    def _add(self, _: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Any:
        chosen = self._layers.chosen
        if chosen is None or self._layers.thread != threading.get_ident():
            return None
        self.calls += 1
        start, stop, mask = chosen.part(self.ranks)
        if start == stop:
            return None
        given: torch.Tensor = args[0]
        inner = self._inner(given.to(self._a), self._a[start:stop])
        if mask is not None:
            inner = inner.masked_fill(~self._fitting(mask, inner), 0)
        gain = inner @ self._own(self._b[start:stop], output.shape[-1])
        return output + gain.to(output)

    def _inner(self, given: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """What `a` makes of all features, also where each process is given a part of them."""
        width = given.shape[-1]
        inner = given @ self._own(a, width).T
        if width != a.shape[-1]:
            torch.distributed.all_reduce(inner)
        return inner

    def _own(self, matrix: torch.Tensor, width: int) -> torch.Tensor:
        """The columns of a matrix for those features that this process has, `width` of them."""
        shard = self._layers.shard
        if width == matrix.shape[-1] or shard is None:
            return matrix
        begin = shard.begin(matrix.shape[-1])
        return matrix[:, begin : begin + width]

    def _fitting(self, mask: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """The mask for a layer that is given the tokens of all rows one after the other."""
        if mask.device != inner.device:
            mask = mask.to(inner.device)
        rows, width = self._layers.shape
        if inner.dim() == 3 and len(inner) == rows and mask.shape[1] in (1, inner.shape[1]):
            return mask
        if inner.dim() != 2 or len(inner) != rows * width:
            raise ExecutionError(
                f"{self.name} was called with tokens in another shape ({[*inner.shape]}) than the "
                f"step has ([{rows}, {width}]), so that adapters cannot tell them apart; run "
                "requests of one adapter at a time"
            )
        return mask.expand(rows, width, -1).reshape(len(inner), -1)


@dataclass(eq=False)
class Chosen:
    """The adapters of one step: `slots` is int64 `[rows, width or 1]`, -1 for none.

    It is None where every token has the same one. `present` are the slots in it, sorted. `owners`
    keeps from step to step which slot each row of a stack belongs to: on a GPU, sending that would
    be waited for.
    """

    slots: torch.Tensor | None
    present: Sequence[int]
    owners: dict[tuple[Ranks, int, int], torch.Tensor]

    def __post_init__(self) -> None:
        self._parts: dict[Ranks, Part] = {}

    def part(self, ranks: Ranks) -> Part:
        """What of a stack of these ranks is needed, made once a step."""
        if (found := self._parts.get(ranks)) is None:
            found = self._parts[ranks] = self._made(ranks)
        return found

    def _made(self, ranks: Ranks) -> Part:
        first, last = self.present[0], self.present[-1]
        start, stop = sum(ranks[:first]), sum(ranks[: last + 1])
        if self.slots is None or start == stop:
            return Part(start, stop, None)
        if (owner := self.owners.get((ranks, first, last))) is None:
            each = [slot for slot in range(first, last + 1) for _ in range(ranks[slot])]
            owner = self.owners[ranks, first, last] = torch.tensor(each, device=self.slots.device)
        return Part(start, stop, self.slots[..., None] == owner)


class LoraLayers:
    """All layers of a model that some adapter changes. Nothing is hooked while there is none."""

    def __init__(self, model: PreTrainedModel, shard: Shard | None = None) -> None:
        self._model = model
        self.shard = shard  # which part of each layer is here; None: all of it
        self._stacks: dict[str, Stack] = {}
        self.chosen: Chosen | None = None
        self.owners: dict[tuple[Ranks, int, int], torch.Tensor] = {}  # as in `Chosen`
        self.shape = (0, 0)  # of the step: rows, width
        self.thread = 0  # that computes the step; a live model may be called in others

    def build(self, held: Sequence[dict[str, Matrices]]) -> None:
        """Hold the adapters of these slots, and no others; each becomes a view of what is held."""
        self.owners.clear()
        names = dict.fromkeys(name for adapter in held for name in adapter)
        for name in self._stacks.keys() - names.keys():
            self._stacks.pop(name).remove()
        for name in names:
            stack = self._stacks.get(name) or self._hooked(name)
            views = stack.build([adapter.get(name) for adapter in held])
            for adapter, view in zip(held, views, strict=True):
                if view is not None:
                    adapter[name] = view

    def _hooked(self, name: str) -> Stack:
        self._stacks[name] = Stack(name, self._model.get_submodule(name), self)
        return self._stacks[name]

    def choose(self, chosen: Chosen | None, shape: tuple[int, int]) -> None:
        """Have forward calls of this thread use these adapters."""
        self.chosen, self.shape, self.thread = chosen, shape, threading.get_ident()
        for stack in self._stacks.values() if chosen is not None else ():
            stack.calls = 0

    def check_called(self) -> None:
        """Raise ExecutionError where a layer was computed without being called."""
        if self.chosen is None:
            return
        for name, stack in self._stacks.items():
            if not stack.calls:
                raise ExecutionError(
                    f"{name} was computed without its own forward call, where the adapters are; "
                    "load without adapters, or without what computes it (kernels, attention)"
                )

    def remove(self) -> None:
        for stack in self._stacks.values():
            stack.remove()
        self._stacks = {}


def computing_device(module: nn.Module) -> torch.device:
    """Where a layer computes, also one whose weights wait elsewhere."""
    hook = getattr(module, "_hf_hook", None)
    if (device := getattr(hook, "execution_device", None)) is not None:
        return torch.device(device)
    tensors = [*module.parameters(), *module.buffers()]
    return next((one.device for one in tensors), torch.device("cpu"))
