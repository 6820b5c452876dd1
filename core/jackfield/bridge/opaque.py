"""The attention as one operator of torch, so that a compiler sees it and does not look inside.

A compiled step is the model without its attention: what reads and writes keys and values is called
in plain Python from within. So every attention and every cache works under every compiler, calls
are counted where they happen, and pages, masks and lengths, which change with each step, are no
part of what is compiled. Which step a call belongs to is known by the thread that takes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield.bridge.native_attention import NativeAttention
    from jackfield.contracts.native import NativeCall

#: The keyword arguments that travel with the call, as torch's schemas write their types.
_TRAVEL = {
    "s_aux": "Tensor?",
    "scaling": "float?",
    "sliding_window": "int?",
    "softcap": "float?",
    "is_causal": "bool?",
}
#: Those that say nothing to an attention that runs outside of the model.
_STAY = frozenset({"cache_position", "dropout", "position_ids", "use_cache"})

Attend = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(eq=False)
class OpaqueStep:
    """One compiled step, for the attention calls that come out of it.

    The first `rows` rows and `width` columns are the step's own tokens, the rest was filled up.
    `attend` is the attention as it is called in steps that are not compiled. Where keys and values
    lie in a cache of transformers, it is `past`, and `masks` has the mask of each layer; `sources`
    has the layer that keeps what another one reads. One that may `run_as_it_is` lies at a fixed
    place, and nothing has to compile it.
    """

    attend: Attend
    modules: Mapping[int, nn.Module]
    rows: int
    width: int
    past: Any = None
    masks: Mapping[int, torch.Tensor | None] | None = None
    native: NativeAttention | None = None
    run_as_it_is: bool = False
    sources: Mapping[int, int] = field(default_factory=dict)
    _kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def native_calls(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        kwargs: dict[str, Any],
    ) -> Seq[NativeCall] | None:
        """What does natively what calling this does, in the packed layout; None: nothing does."""
        if self.native is None:
            return None
        return self.native.calls(layer, self.width, query, key, value, output, kwargs)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Output `[rows, tokens, heads, value head_dim]`, 0 for tokens that are nobody's."""
        rows, columns = query.shape[0], query.shape[2]
        filled = (rows, columns) != (self.rows, self.width)
        if filled:
            query, key, value = (t[: self.rows, :, : self.width] for t in (query, key, value))
        mask = None
        if self.past is not None:
            key, value = self._cached(layer, key, value)
            mask = cut_to(self.masks[layer] if self.masks else None, key)
        output = self.attend(self.modules[layer], query, key, value, mask, **kwargs)[0]
        if not filled:
            return output.contiguous()
        whole = output.new_zeros(rows, columns, *output.shape[2:])
        whole[: self.rows, : self.width] = output
        return whole

    def _cached(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values that a layer sees, with those of the step."""
        if layer in self.sources:
            return self._kept[self.sources[layer]]
        found: tuple[torch.Tensor, torch.Tensor] = self.past.update(key, value, layer)
        if self.sources:
            self._kept[layer] = found
        return found


@dataclass(eq=False)
class Comparison:
    """A step that is not compiled, in which the model's own masks are held against `masks`."""

    masks: Mapping[int, torch.Tensor | None]

    def check(self, layer: int, key: torch.Tensor, mask: torch.Tensor | None) -> None:
        expected = cut_to(self.masks[layer], key)
        same = mask is expected if mask is None or expected is None else torch.equal(mask, expected)
        if not same:
            raise ExecutionError(
                f"layer {layer} of this model gets a mask that only its own code can make, and "
                "compiled steps need it made outside; load it without compile"
            )


def cut_to(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """`mask` for as many keys as there are; some models cut it themselves."""
    return mask if mask is None else mask[..., : key.shape[2]]


class _Now(threading.local):
    step: OpaqueStep | Comparison | None = None
    tracing = False


_now = _Now()


class within:  # noqa: N801 - reads as a word of the language
    """While it is open, attention calls of this thread belong to `step`."""

    def __init__(self, step: OpaqueStep | Comparison) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._before, _now.step = _now.step, self._step

    def __exit__(self, *_: object) -> None:
        _now.step = self._before


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While it is open, this thread's compiler may read a step."""
    before, _now.tracing = _now.tracing, True
    try:
        yield
    finally:
        _now.tracing = before


def is_read() -> bool:
    """Whether a compiler reads this call.

    What torch says outside of Dynamo is of the whole process: of another engine's compiler, too.
    """
    return torch.compiler.is_dynamo_compiling() or (
        torch.compiler.is_compiling() and (_now.tracing or isinstance(_now.step, OpaqueStep))
    )


def opaque(attend: Attend) -> Attend:
    """`attend`, which becomes one operator where a compiler reads it."""

    def forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if is_read():
            return _operator(query, key, value, module.layer_idx, *_travelling(kwargs)), None
        step = _now.step
        if isinstance(step, OpaqueStep):
            if step.run_as_it_is:
                return _run(query, key, value, module.layer_idx, *_travelling(kwargs)), None
            raise ExecutionError(
                "a step runs uncompiled that was to be compiled: its compiler does not compile it, "
                "or torch is told not to (TORCHDYNAMO_DISABLE, torch.compiler.set_stance, disable)"
            )
        if step is not None:
            step.check(module.layer_idx, key, attention_mask)
        return attend(module, query, key, value, attention_mask, **kwargs)

    return forward


def unmasked(mask: Callable[..., Any]) -> Callable[..., Any]:
    """`mask`, which makes none where a compiler reads it; see `OpaqueStep.masks`."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if is_read():  # which comes first: torch 2.11 cannot read what a step is
            return None
        step = _now.step
        if isinstance(step, OpaqueStep) and step.run_as_it_is:
            return None
        return mask(*args, **kwargs)

    return made


def _travelling(kwargs: dict[str, Any]) -> list[Any]:
    for name, value in kwargs.items():
        if name not in _TRAVEL and name not in _STAY and value is not None and value is not False:
            raise ExecutionError(f"the model hands {name!r} to its attention")
    return [kwargs.get(name) for name in _TRAVEL]


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any
) -> torch.Tensor:
    return _this_step()(layer, query, key, value, _travelled(rest))


def native_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    *rest: Any,
) -> Seq[NativeCall] | None:
    """See `NativeOffers.attention`."""
    return _this_step().native_calls(output, query, key, value, layer, _travelled(rest))


def native_again(outputs: Mapping[int, torch.Tensor]) -> bool:
    """See `NativeOffers.again`."""
    step = _this_step()
    return step.native is not None and step.native.again(step.width, outputs)


def _this_step() -> OpaqueStep:
    if not isinstance(step := _now.step, OpaqueStep):
        raise ExecutionError("a compiled step was called by somebody else than its engine")
    return step


def _travelled(rest: tuple[Any, ...]) -> dict[str, Any]:
    return {name: v for name, v in zip(_TRAVEL, rest, strict=True) if v is not None}


def _shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any
) -> torch.Tensor:
    """An output for tracing, which needs its shape only."""
    rows, heads, columns, _ = query.shape
    return query.new_empty(rows, columns, heads, value.shape[-1])


def _define() -> tuple[torch.library.Library, Any]:
    library = torch.library.Library("jackfield", "FRAGMENT")
    travelling = ", ".join(f"{kind} {name}" for name, kind in _TRAVEL.items())
    library.define(
        f"attend(Tensor query, Tensor key, Tensor value, int layer, {travelling}) -> Tensor"
    )
    library.impl("attend", _run, "CompositeExplicitAutograd")
    torch.library.register_fake("jackfield::attend", _shape, lib=library)
    return library, torch.ops.jackfield.attend.default


_library, _operator = _define()  # what was defined is gone with the library object
