"""`output_hidden_states` and `output_attentions`: what the layers say of a text that has ended."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

from jackfield.bridge.layer_outputs import LayerOutputs, LayerReader
from jackfield.bridge.model_layers import own_implementation
from jackfield.contracts.requirements import BYTES
from jackfield.devices import free_bytes
from jackfield.errors import ExecutionError, SettingsError
from jackfield.sampling.fenced import OwnFailure, fenced
from jackfield.units import in_units

if TYPE_CHECKING:
    from jackfield.contracts import Settings
    from jackfield.engine.bound import BoundModel
    from jackfield.engine.sequences import RunningSequence

MOST_BYTES = 2 << 30  # of each of the two, of one request
NOTHING = LayerOutputs(None, None)


class Introspection:
    """Computes a text once more where its request asks what is inside; others pay nothing."""

    def __init__(self, bound: BoundModel) -> None:
        self._bound = bound

    @cached_property
    def _reader(self) -> LayerReader:
        return LayerReader(self._bound.model, [*self._bound.layers, self._bound.attention])

    def check(self, settings: Settings, length: int, *, images: bool) -> None:
        """Raise SettingsError for a request of `length` prompt tokens that cannot be told this."""
        asked = _asked(settings)
        if asked and (why := self._unreadable(images)):
            raise SettingsError(f"{asked[0]}=True: {why}; drop it")
        if settings.output_attentions and not self._bound.plan.requirements.attends:
            raise SettingsError("output_attentions=True: no layer of this model attends; drop it")
        if settings.output_attentions and own_implementation(self._bound.model) != "eager":
            raise SettingsError(
                f"output_attentions=True: {type(self._bound.model).__name__} shows none of the "
                "attention that it runs (with them it adds its ALiBi twice); drop it"
            )
        tokens = length + settings.max_new_tokens - 1  # the last one is never fed
        for name in asked:
            texts = settings.num_return_sequences
            size = texts * self._bytes(name, tokens)
            if size > MOST_BYTES:
                share = MOST_BYTES / size
                fit = math.floor(tokens * (share if name == "output_hidden_states" else share**0.5))
                raise SettingsError(
                    f"{name}=True takes {in_units(size)} for {tokens} tokens"
                    f"{f' of each of {texts} texts' if texts > 1 else ''}, and "
                    f"{in_units(MOST_BYTES)} are the most for one request: shorten the prompt or "
                    f"lower max_new_tokens, to {fit} tokens together, or drop it"
                )

    def _unreadable(self, images: bool) -> str | None:
        """Why nothing inside the model can be told of a text; None: it can."""
        needs = self._bound.plan.requirements
        if needs.tp_size > 1:
            return f"each of the {needs.tp_size} processes that share this model has a part of it"
        if needs.encoder is not None:
            return "an encoder and a decoder have layers apart, and this is one array for all"
        if why := needs.features.get("bidirectional_prefix"):
            return (
                f"{needs.architecture} reads a prompt in both directions ({why}) and a text in one"
            )
        return "a text with images is not computed once more" if images else None

    def _bytes(self, name: str, tokens: int) -> int:
        """What one of the two takes for so many tokens."""
        needs = self._bound.plan.requirements
        if name == "output_hidden_states":
            size = self._bound.model.config.get_text_config(decoder=True).hidden_size
            numbers = (len(needs.layer_types) + 1) * tokens * size
        else:
            attending = sum(kind != "linear_attention" for kind in needs.layer_types)
            numbers = attending * needs.num_attention_heads * tokens**2
        return int(numbers * BYTES[needs.dtype])

    def of(self, sequence: RunningSequence) -> LayerOutputs:
        """What the layers say of a text that is whole. A failure is the error of its request.

        Of one that was cancelled, or failed, nothing is computed any more.
        """
        asked = _asked(sequence.settings)
        if not asked or sequence.finish_reason not in ("stop", "length"):
            return NOTHING
        try:
            return fenced(" and ".join(asked), sequence.id, lambda: self._computed(sequence))
        except OwnFailure as failure:
            sequence.fail(failure)
            return NOTHING

    def _computed(self, sequence: RunningSequence) -> LayerOutputs:
        settings, adapters = sequence.settings, self._bound.adapters
        fed = sequence.tokens[: sequence.prompt_length + max(0, sequence.num_new - 1)]
        size = sum(self._bytes(name, len(fed)) for name in _asked(settings))
        free = free_bytes("cpu")
        if free is not None and 2 * size > free:  # the parts, and all of them in one array
            raise ExecutionError(f"it takes {in_units(2 * size)}, and {in_units(free)} are free")
        apart = nullcontext() if adapters is None else adapters.alone(sequence.adapter, len(fed))
        with apart:
            return self._reader(
                fed,
                hidden_states=settings.output_hidden_states,
                attentions=settings.output_attentions,
            )


def _asked(settings: Settings) -> list[str]:
    """Which of the two a request asks for."""
    return [n for n in ("output_hidden_states", "output_attentions") if getattr(settings, n)]
