"""A tape in the place of a GPU's recordings.

It notes every operation of torch with the very tensors that it read and left, and plays them again
into the same memory, whatever Python would do by now. As with CUDA, what is recorded has not been
computed, and what a GPU cannot record fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils import import_utils

from jackfield.bridge import opaque
from jackfield.contracts import CompilerCapabilities
from jackfield_plugins.compiler.cuda_graph import CudaGraphCompiler, compilation, graphs

if TYPE_CHECKING:
    import pytest

#: What makes the host wait for the device, or copies from memory that may be paged out.
NOT_PERMITTED = tuple(
    f"aten::{name}" for name in ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero")
)


class Tape(TorchDispatchMode):
    """What one function did, and in which memory. `changes`: it may change what it is given."""

    now: ClassVar[Tape | None] = None  # what records

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Any]]] = []
        self.given: set[int] = set()  # memory that was there before
        self.made: set[int] = set()
        self._changes = changes
        self.launched = 0  # operations that are no views
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name == "jackfield::attend":  # a GPU records what it does, not that it was called
            with self:
                return opaque._run(*args, **(kwargs or {}))
        assert self._changes or not func._schema.is_mutable, f"{func} changes what it is given"
        if name in NOT_PERMITTED:
            raise RuntimeError(f"CUDA error: {name} is not permitted when stream is capturing")
        self.given |= memory((args, kwargs)) - self.made
        if func._schema.is_mutable and memory(args[0]) <= self.given:
            self._before.append((args[0], args[0].clone()))
        left = func(*args, **(kwargs or {}))
        self.launched += works(func)
        self.made |= memory(left) - self.given
        here = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
        self.done.append((func, *here, tree_leaves(left)))
        return left

    def __enter__(self) -> Self:
        Tape.now = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Tape.now = None
        super().__exit__(*error)

    def launch(self, kernel: Callable[..., None], *given: Any) -> None:
        """Note a kernel that is none of torch's, which was launched with `given`."""
        self.launched += 1
        self.done.append((kernel, given, {}, [None]))

    def forget(self) -> None:
        """Leave what was made or changed as a recording does, which computes nothing."""
        for *_, left in self.done:
            for tensor in left:
                if isinstance(tensor, torch.Tensor) and memory(tensor) <= self.made:
                    tensor.fill_(math.nan if tensor.is_floating_point() else 1)
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before.clear()

    def play(self) -> None:
        for func, args, kwargs, left in self.done:
            for mine, new in zip(left, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(mine, torch.Tensor) and mine.data_ptr() != new.data_ptr():
                    mine.copy_(new)  # a view lies where it lay


def memory(tensors: Any) -> set[int]:
    """The addresses of what the tensors are views of."""
    found = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in found}


def works(func: Any) -> bool:
    """Whether an operation has a device do something: no view, and none that only takes room."""
    views = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
    idle = ("aten::empty", "aten::new_empty", "aten::detach_")
    return not views and not func._schema.name.startswith(idle)


class Host(TorchDispatchMode):
    """Counts what the host tells a device: operations, kernels, and recordings that are played."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name == "jackfield::attend":
            with self:
                return opaque._run(*args, **(kwargs or {}))
        self.told += works(func)
        return func(*args, **(kwargs or {}))

    @classmethod
    def tell(cls) -> None:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, cls):
                mode.told += 1


def launching(make: Callable[..., Any]) -> Callable[..., Any]:
    """`jackfield_plugins.launching.ready`, whose interpreted kernels are noted on a tape."""

    def ready(*what: Any, **options: Any) -> Any:
        run = make(*what, **options)

        def alone(*given: Any) -> None:
            with _disable_current_modes():
                run(*given)

        def launch(*given: Any) -> None:
            alone(*given)
            Host.tell()
            if Tape.now is not None:
                Tape.now.launch(alone, *given)

        return launch

    return ready


class Tapes:
    """In the place of `CudaGraphs`. `broken`: what a recording ends with."""

    source = "tapes"
    num_bytes = 0
    changes = False
    broken: BaseException | None = None
    played = 0

    def __init__(self, device: torch.device) -> None:
        del device

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        if self.broken is not None:
            raise self.broken
        if self.changes:
            run()  # the warm-up
        with Tape(changes=self.changes) as tape:
            result = run()
        tape.forget()

        def play() -> None:
            type(self).played += 1
            Host.tell()
            with _disable_current_modes():
                tape.play()

        return result, play


class Again:
    """In the place of `CudaGraphs`: to play is to run once more, into the same memory.

    For code that is compiled, whose operations no tape sees.
    """

    source = "again"
    num_bytes = 0
    played = 0

    def __init__(self, device: torch.device) -> None:
        del device

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        result = run()

        def play() -> None:
            type(self).played += 1
            for old, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
                old.copy_(new)

        return result, play


def record_on(monkeypatch: pytest.MonkeyPatch, recorder: Any, *, whole: bool = True) -> None:
    """Have `cuda_graph` run here, with `recorder` in the place of a GPU's.

    What inductor compiles no tape sees, so only its graph is played there.
    """

    def unfused(graph: Any, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=lambda traced, _: traced)(graph, inputs)

    if issubclass(recorder, Tapes):
        monkeypatch.setattr(compilation, "fused", unfused)
    monkeypatch.setattr(graphs, "CudaGraphs", recorder)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: Tape.now is not None)
    monkeypatch.setattr(CudaGraphCompiler, "capabilities", CompilerCapabilities(records=whole))
    monkeypatch.setattr(CudaGraphCompiler, "available", lambda _: [])
