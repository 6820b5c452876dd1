"""What a decoder looks at of an encoder that reads features: rows of several lengths, masked."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MASK = "encoder_attention_mask"


class Crossing:
    """Hands the decoder of `model` the mask of what its encoder said.

    A model for features makes that mask itself, of the mask of what its encoder read, which has
    another length: so the decoder is told when it is called, by a hook that lasts for one call.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder: Any = model.get_decoder()
        self._takes = _MASK in inspect.signature(self._decoder.forward).parameters

    @contextlib.contextmanager
    def masked(self, mask: torch.Tensor | None) -> Iterator[None]:
        """Calls of the model meanwhile hide what `mask` (`[rows, columns]`) has as 0.

        Raises ExecutionError for a decoder that takes no mask, as Whisper's does, whose encoder
        says equally much of every prompt.
        """
        if mask is None:
            yield
            return
        if not self._takes:
            raise ExecutionError(
                f"{type(self._decoder).__name__} takes no {_MASK}, and its encoder said more of "
                "one prompt than of another"
            )

        def tell(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, _MASK: mask}

        handle = self._decoder.register_forward_pre_hook(tell, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def overheard(self) -> Iterator[list[torch.Tensor | None]]:
        """Notes the masks that the model itself hands its decoder meanwhile, one for each call."""
        masks: list[torch.Tensor | None] = []

        def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            masks.append(kwargs.get(_MASK))

        handle = self._decoder.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield masks
        finally:
            handle.remove()
