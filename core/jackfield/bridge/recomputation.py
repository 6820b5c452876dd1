"""A model's step computed again without any backend: alone, eager, nothing cached or compiled.

With it comes how far rounding alone carries in this model: everything is computed a second time,
with what each layer gives off by about one rounding.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from jackfield.bridge.attention import KEY, decoder_configs
from jackfield.bridge.forward import forward_of
from jackfield.bridge.model_attention import model_attention
from jackfield.contracts import ModelInputs
from jackfield.devices import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_serial = itertools.count(1)

#: What is due to rounding: so many times what one in each layer does, and this share of
#: how far the numbers spread. Also in float64, where models have softmax and norms in float32.
TIMES = 16.0
SHARE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a layer's attention was handed for a sequence and gave: `[tokens, heads, head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True, eq=False)
class Recomputed:
    """One sequence, computed again.

    Attributes:
        logits: `[k, vocab]`, what follows its last k tokens.
        layers: Layer -> its attention's call, of all tokens; empty where a model's attention is
            part of its code.
    """

    logits: torch.Tensor
    layers: dict[int, AttentionCall]


class Plugged(Protocol):
    """What changes a model, or counts what it does."""

    def set_aside(self) -> AbstractContextManager[None]:
        """Let the model be as if it were not there, for a while."""


class Recomputation:
    """Computes sequences of `model` again; what of `plugged` is in it is set aside meanwhile."""

    def __init__(self, model: PreTrainedModel, plugged: Sequence[Plugged]) -> None:
        self._model = model
        self._plugged = plugged
        self._forward = forward_of(model)
        self._eager = model_attention(model)

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], keep: int) -> tuple[Recomputed, Recomputed]:
        """The sequence as it is, and with a rounding in each layer; logits of the last `keep`."""
        with contextlib.ExitStack() as aside:
            for one in self._plugged:
                aside.enter_context(one.set_aside())
            exact, rounded = (self._once(tokens, keep, rounds) for rounds in (False, True))
        return exact, rounded

    def _once(self, tokens: Sequence[int], keep: int, rounds: bool) -> Recomputed:
        found: dict[int, AttentionCall] = {}
        ids = torch.tensor([list(tokens)], device=input_device(self._model))
        inputs = ModelInputs(
            {
                "input_ids": ids,
                "position_ids": torch.arange(ids.shape[1], device=ids.device)[None],
                "attention_mask": None,
                "use_cache": False,
                "logits_to_keep": keep,
            },
            rows=1,
        )
        with self._selected(found), _rounding(self._model) if rounds else contextlib.nullcontext():
            logits = self._forward(inputs)[0]
        return Recomputed(logits, found)

    @contextlib.contextmanager
    def _selected(self, found: dict[int, AttentionCall]) -> Iterator[None]:
        """Have the model call its own eager attention, which notes what it is handed."""
        if self._eager is None:  # part of the model's code: there is no other
            yield
            return
        eager: Any = self._eager

        def noting(
            module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            output = eager.forward(module, query, key, value, mask, **kwargs)[0]
            queries, keys, values = (t[0].transpose(0, 1) for t in (query, key, value))
            found[module.layer_idx] = AttentionCall(queries, keys, values, output[0])
            return output, None

        with attending(self._model, noting, eager.mask):
            yield


@contextlib.contextmanager
def attending(
    model: PreTrainedModel, forward: Callable[..., Any], mask: Callable[..., Any]
) -> Iterator[None]:
    """Have the model call `forward` as its attention, with what `mask` makes."""
    key = f"{KEY}recomputed-{next(_serial)}"
    AttentionInterface.register(key, forward)
    AttentionMaskInterface.register(key, mask)
    configs = decoder_configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = key
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        AttentionInterface._global_mapping.pop(key, None)
        AttentionMaskInterface._global_mapping.pop(key, None)


@contextlib.contextmanager
def _rounding(model: torch.nn.Module) -> Iterator[None]:
    """What each layer with weights gives is off by about one rounding, always the same one."""
    generator = torch.Generator().manual_seed(0)

    def rounded(_module: Any, _args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        noise = torch.randn(output.shape, generator=generator).to(output)
        eps = max(torch.finfo(torch.float32).eps, torch.finfo(output.dtype).eps)
        return output * (1 + eps * noise)

    leaves = [m for m in model.modules() if not [*m.children()] and [*m.parameters()]]
    hooks = [module.register_forward_hook(rounded) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Difference:
    """How far numbers of one sequence are off at most, and what is due to rounding.

    `token` is the first that is off by more, counted in the rows that were compared; None: no one.
    """

    off: float
    allowed: float
    token: int | None


def difference(found: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> Difference:
    """Compare `found` with `exact`, both `[tokens, …]`; `rounded` says what rounding does to it."""
    exact = exact.double()
    carried = float((rounded.double() - exact).abs().max())
    allowed = TIMES * carried + SHARE.get(found.dtype, 5e-2) * float(exact.std(correction=0))
    off = (found.double() - exact).abs().flatten(1).amax(1)
    off = off.nan_to_num(nan=torch.inf)
    wrong = (off > allowed).nonzero()
    return Difference(float(off.max()), allowed, int(wrong[0]) if len(wrong) else None)
