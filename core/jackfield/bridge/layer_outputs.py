"""What a model's layers say of a text: one call of its own code over all tokens, nothing bound.

A step cannot tell: its tokens are packed, what computes it need not make the weights of an
attention, and a compiled step is no calls of layers. So it is computed once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import DynamicCache

from jackfield.bridge.encoders import cached_config
from jackfield.bridge.forward import call_of
from jackfield.bridge.model_attention import model_attention
from jackfield.bridge.recomputation import Plugged, attending
from jackfield.devices import input_device
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 512  # queries of which an eager attention makes all scores at once
_HOOKED = "_output_capturing_hooks_installed"  # transformers' mark on a model


class LayerOutputs(NamedTuple):
    """On the CPU in the dtype that the model computes in; None: was not asked for.

    Attributes:
        hidden_states: `[layers + 1, tokens, hidden_size]`, the embeddings first.
        attentions: `[layers that attend, heads, tokens, tokens]`: a query's row, 0 where it does
            not look.
    """

    hidden_states: torch.Tensor | None
    attentions: torch.Tensor | None


class LayerReader:
    """Reads the layers of `model`; what of `plugged` is in it is set aside meanwhile."""

    def __init__(self, model: PreTrainedModel, plugged: Sequence[Plugged]) -> None:
        self._model, self._plugged = model, plugged
        self._call = call_of(model)
        self._eager = model_attention(model)

    def __call__(
        self, tokens: Sequence[int], *, hidden_states: bool, attentions: bool
    ) -> LayerOutputs:
        """What they say of `tokens`. Raises ExecutionError where the model does not tell."""
        wanted = {"hidden_states": hidden_states, "attentions": attentions}
        with contextlib.ExitStack() as aside:
            for one in self._plugged:
                aside.enter_context(one.set_aside())
            aside.enter_context(_hooks_as_before(self._model))
            aside.enter_context(torch.inference_mode())
            if self._eager is not None:
                forward = _in_blocks(self._eager.forward, keep=attentions)
                aside.enter_context(attending(self._model, forward, self._eager.mask))
            asked = {f"output_{name}": True for name, is_so in wanted.items() if is_so}
            found = self._call({**self._arguments(tokens), **asked})
            shown = {n: self._parts(found, n, len(tokens)) for n, is_so in wanted.items() if is_so}
        # Outside of inference mode, whose tensors nobody may write into.
        arrays = {name: torch.stack(parts) for name, parts in shown.items()}
        return LayerOutputs(arrays.get("hidden_states"), arrays.get("attentions"))

    def _arguments(self, tokens: Sequence[int]) -> dict[str, Any]:
        """As `generate` reads a prompt: some layers find the keys of others in the cache."""
        ids = torch.tensor([list(tokens)], device=input_device(self._model))
        return {
            "input_ids": ids,
            "position_ids": torch.arange(ids.shape[1], device=ids.device)[None],
            "attention_mask": None,
            "past_key_values": DynamicCache(config=cached_config(self._model.config)),
            "use_cache": True,
            "logits_to_keep": 1,
        }

    def _parts(self, found: Any, name: str, tokens: int) -> list[torch.Tensor]:
        """Each layer's part of an output of the model, `[…, tokens, …]` on the CPU."""
        parts = getattr(found, name, None) or ()
        shapes = {None if part is None else part.shape for part in parts}
        shape = shapes.pop() if len(shapes) == 1 else None
        if shape is None or shape[0] != 1 or shape[-2] != tokens:
            raise ExecutionError(
                f"{type(self._model).__name__} has no {name} of {tokens} tokens and one shape in "
                "all layers; call the model itself to see what it has"
            )
        return [part[0].cpu() for part in parts]


def _in_blocks(eager: Callable[..., Any], *, keep: bool) -> Callable[..., Any]:
    """`eager`, a block of queries at a time; where its weights are kept, they leave the device."""

    def forward(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = kwargs.pop("position_bias", None)
        outputs, weights = [], []
        for start in range(0, query.shape[2], BLOCK):
            block = slice(start, start + BLOCK)
            if bias is not None:
                kwargs["position_bias"] = _rows_of(bias, block)
            seen = _rows_of(mask, block)
            output, weight = eager(module, query[:, :, block], key, value, seen, **kwargs)
            outputs.append(output)
            if keep:
                weights.append(weight.cpu())
        return torch.cat(outputs, 1), torch.cat(weights, 2) if keep else None

    return forward


def _rows_of(tensor: torch.Tensor | None, block: slice) -> torch.Tensor | None:
    """What a mask or a bias has for a block of queries; one for all of them is theirs too."""
    return tensor if tensor is None or tensor.shape[-2] == 1 else tensor[..., block, :]


@contextlib.contextmanager
def _hooks_as_before(model: torch.nn.Module) -> Iterator[None]:
    """transformers hooks all layers when it is first asked for their outputs, and for good.

    Hooks that stay would cost something in each later step, and have compiled ones made anew.
    """
    before = [(m, {*m._forward_hooks}, _HOOKED in vars(m)) for m in model.modules()]
    try:
        yield
    finally:
        for module, hooks, marked in before:
            for number in module._forward_hooks.keys() - hooks:
                del module._forward_hooks[number]
            if not marked:
                vars(module).pop(_HOOKED, None)
