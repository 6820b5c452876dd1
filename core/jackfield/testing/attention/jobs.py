"""Models that need one thing of their attention, and an attention bound to one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from jackfield.bridge.model_attention import model_attention
from jackfield.bridge.model_layers import attention_modules
from jackfield.bridge.requirements import describe
from jackfield.contracts import (
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    ModelAttention,
    Requirements,
)
from jackfield.planning.solving import reasons_against
from jackfield.testing.checks import NotTriedError
from jackfield.testing.models import build
from jackfield.testing.subject import Subject

if TYPE_CHECKING:
    import transformers

#: The dtype in which features are checked: the first that is declared.
PREFERRED = ("float32", "float64", "bfloat16", "float16")
_ALL_FULL = {"layer_types": ["full_attention"] * 2}
#: Sizes of heads that models of `MODELS` have, by the argument that sets them.
_HEAD_SIZES = {
    "plain": "head_dim",
    "grouped_query": "head_dim",
    "sliding_window": "head_dim",
    "softcap": "head_dim",
    "sinks": "head_dim",
    "chunked": "head_dim",
    "bidirectional_prefix": "head_dim",
}


def capabilities_of(subject: Subject) -> AttentionCapabilities:
    return subject.backend.capabilities  # type: ignore[no-any-return]


def main_dtype(subject: Subject) -> str:
    """The dtype in which everything is checked that is not about dtypes."""
    return next(d for d in PREFERRED if d in capabilities_of(subject).dtypes)


def model_changes(subject: Subject, name: str) -> dict[str, Any]:
    """What is changed in a model of `MODELS`, so that it needs what it is named for and little
    else that `subject` does not declare."""
    can = capabilities_of(subject)
    changes: dict[str, Any] = {}
    if "grouped_query" not in can.features and name in ("sliding_window", "softcap", "sinks"):
        changes["num_key_value_heads"] = 4
    if "sliding_window" not in can.features and name in ("softcap", "sinks"):
        changes |= _ALL_FULL
    sizes = can.head_dims
    if sizes is None:
        return changes
    if name in _HEAD_SIZES and not sizes & {10, 12}:
        changes[_HEAD_SIZES[name]] = min((s for s in sizes if s % 2 == 0), default=min(sizes))
    if name == "mixed_head_sizes" and len(sizes) > 1:
        small, large = sorted(sizes)[:2]
        changes |= {"v_head_dim": small, "qk_rope_head_dim": 2, "qk_nope_head_dim": large - 2}
    if name in ("own_mask", "own_attention", "position_bias"):
        changes["hidden_size"] = 4 * min(sizes)
    return changes


def model_of(subject: Subject, name: str, dtype: str = "") -> transformers.PreTrainedModel:
    """The model of that name that `subject` can be expected to serve."""
    wanted = getattr(torch, dtype or main_dtype(subject))
    return build(name, wanted, subject.seed, **model_changes(subject, name))


@dataclass(frozen=True, eq=False)
class Job:
    """An attention that is bound to a model, called by hand.

    Attributes:
        bound: Its functions.
        module: The attention module of the first layer of the model.
        requirements: What it was bound for.
        dtype: Of query, keys and values.
        device: A torch device.
        models_own: It is the attention in the model's code.
    """

    bound: BoundAttention
    module: nn.Module
    requirements: Requirements
    dtype: torch.dtype
    device: str
    models_own: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """The sizes of query/key and value heads."""
        sizes = self.requirements.head_dims
        return sizes[-1], sizes[0]


def requirements_of(
    subject: Subject, model: transformers.PreTrainedModel, layout: str, **more: Any
) -> Requirements:
    """What `model` needs of its attention in a layout."""
    dtype = str(model.dtype).removeprefix("torch.")
    needs = describe(model, dtype=dtype, device=torch.device(subject.device))
    return replace(needs, layout=layout, **more)


def _of_heads(queries: int, keys: int) -> dict[str, Any]:
    """What a model of so many heads changes in its config, which has as little else as can be."""
    return {
        "num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": 2 * queries,
        "num_hidden_layers": 1,
    }  # fmt: skip


@contextlib.contextmanager
def bound_to(
    subject: Subject, name: str, layout: str, dtype: str = "", head_dim: int | None = None,
    heads: tuple[int, int] | None = None, window: int | None = None, **more: Any,
) -> Iterator[Job]:  # fmt: skip
    """`subject` bound to the model of that name. `more` are requirements.

    `heads` are those of queries and of keys, and `window` is the window, in place of the model's.

    Raises NotTriedError where it refuses the model, or leaves the attention to its code.
    """
    wanted = getattr(torch, dtype or main_dtype(subject))
    changes = model_changes(subject, name)
    if head_dim is not None:
        changes["head_dim"] = head_dim
    if heads is not None:
        changes |= _of_heads(*heads)
    if window is not None:
        changes["sliding_window"] = window
    model: Any = build(name, wanted, subject.seed, **changes)
    model.to(subject.device)
    needs = requirements_of(subject, model, layout, **more)
    if reasons := reasons_against(subject.registered, needs, subject.options):
        raise NotTriedError(f"it refuses {needs.architecture}: {'; '.join(reasons)}")
    context = BindContext(
        model=model, config=model.config, requirements=needs, options=subject.options
    )
    bound = subject.registered.bind(context)
    close: Callable[[], None] | None = getattr(bound, "close", None)
    try:
        if own := isinstance(bound, ModelAttention):
            bound = model_attention(model)
            if bound is None:
                raise NotTriedError(f"{needs.architecture} has its attention in its own code")
        _, module = next(iter(attention_modules(model)))
        yield Job(bound, module, needs, wanted, subject.device, own)
    finally:
        if close is not None:
            close()


class Jobs:
    """Attentions that are bound one after the other; the last one stays until another is asked."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._key: Any = None
        self._open = contextlib.ExitStack()

    def bound(self, name: str, layout: str, **how: Any) -> Job:
        """As `bound_to`."""
        if self._key != (key := (name, layout, how)):
            self.close()
            self._job = self._open.enter_context(bound_to(self._subject, name, layout, **how))
            self._key = key
        return self._job

    def close(self) -> None:
        self._key = None
        self._open.close()
