"""One forward call of a transformers model, as the loop makes it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.crossing import Crossing
from jackfield.bridge.encoders import for_the_whole, has_encoder
from jackfield.bridge.features import reads_features
from jackfield.bridge.fixed_shapes import with_fixed_shapes
from jackfield.bridge.numbering import Numbering
from jackfield.bridge.quirks import READS_A_PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.contracts import ModelInputs

#: Arguments that some models work out by themselves, from the attention mask and the cache.
_DERIVABLE = ("position_ids", "decoder_position_ids", "logits_to_keep")


def forward_of(
    model: PreTrainedModel, *, fixed_shapes: bool = False
) -> Callable[[ModelInputs], torch.Tensor]:
    """A function from `ModelInputs` to logits `[rows, k, vocab]`, for this model.

    With `fixed_shapes`, the bits of a token's logits do not depend on the other tokens of the call.
    """
    call = call_of(model)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(inputs: ModelInputs) -> torch.Tensor:
        logits: torch.Tensor = call(inputs.kwargs).logits
        if not keeps:
            keep = inputs.kwargs["logits_to_keep"]
            logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        logits = logits.view(inputs.rows, -1, logits.shape[-1])
        return logits if inputs.row_of is None else logits.index_select(0, inputs.row_of)

    return with_fixed_shapes(forward) if fixed_shapes else forward


def call_of(model: PreTrainedModel) -> Callable[[dict[str, Any]], Any]:
    """A function that calls the model with a step's arguments, by the names that it has for them.

    It returns what the model does, and leaves the arguments as they are.
    """
    parameters = inspect.signature(model.forward).parameters
    absent = [name for name in _DERIVABLE if name not in parameters]
    other_name = "past_key_values" not in parameters and "cache_params" in parameters
    prefix, encodes = READS_A_PREFIX.holds(model), has_encoder(model.config)
    crossing = Crossing(model) if reads_features(model.config) else None
    counts = encodes and "decoder_position_ids" not in parameters
    numbering = Numbering(model) if counts else None
    # What a config asks for training is handed on to each attention, and nobody reads it here.
    router = {"output_router_logits"} & parameters.keys()
    silent = {name: False for name in router if getattr(model.config, name, False)}

    def call(kwargs: dict[str, Any]) -> Any:
        positions: Any = kwargs.get("position_ids")
        if prefix:  # it looks at these in the first step only, which feeds whole prompts
            kwargs = {**kwargs, "token_type_ids": torch.ones_like(kwargs["input_ids"])}
        if encodes:
            kwargs = for_the_whole(kwargs)
        if silent:
            kwargs = {**kwargs, **silent}
        if other_name:  # of a model whose layers all have a state
            kwargs = dict(kwargs)
            kwargs["cache_params"] = kwargs.pop("past_key_values", None)
        if absent:
            kwargs = {key: value for key, value in kwargs.items() if key not in absent}
        if numbering is None and crossing is None:
            return model(**kwargs)
        with contextlib.ExitStack() as meanwhile:
            # Where no column is padding, a token's position is its column.
            if numbering is not None and kwargs.get("decoder_attention_mask") is not None:
                meanwhile.enter_context(numbering.by(positions))
            if crossing is not None:
                kwargs = dict(kwargs)
                meanwhile.enter_context(crossing.masked(kwargs.pop("attention_mask", None)))
            return model(**kwargs)

    return call
