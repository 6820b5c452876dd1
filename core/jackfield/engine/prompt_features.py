"""The features of a prompt: checked, and what the decoder begins with behind them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from jackfield.bridge.feature_encoder import GivenFeatures
from jackfield.bridge.features import FeatureShape, shape_of
from jackfield.bridge.whisper import Beginning, WhisperBeginnings, is_whisper
from jackfield.errors import PromptError, SettingsError, quoted
from jackfield.requests.features import AUDIO, FeaturesPrompt
from jackfield.requests.habits import KEYWORDS
from jackfield.requests.prompts import as_prompt_error, listed
from jackfield.requests.token_settings import one_token, token_ids
from jackfield.requests.vocabulary import OF_SPEECH, START, asks_for_nothing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.bridge.sounds import SoundReader
    from jackfield.requests.wishes import Wishes

#: Settings that look at the tokens that an encoder reads.
_OF_TOKENS = ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty")


@dataclass(frozen=True, eq=False)
class PromptFeatures:
    """The features of a request, and what its text begins with."""

    given: GivenFeatures
    beginning: Beginning


class FeatureIntake:
    """From prompts that are features to what `model` is asked; may be called from threads.

    `sounds` makes features of sounds, or says why nothing does; None: the model hears none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        start: int,
        sounds: SoundReader | str | None = None,
    ) -> None:
        shape = shape_of(model.config)
        assert shape is not None
        self._shape: FeatureShape = shape
        self._model, self._vocab_size, self._start = model, vocab_size, start
        self._whisper = WhisperBeginnings(model, vocab_size) if is_whisper(model) else None
        self._sounds = sounds
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[bytes, GivenFeatures] = WeakValueDictionary()

    @property
    def reads(self) -> str:
        """What the model calls its features."""
        return self._shape.name

    def taken(self, prompt: Any, wished: Wishes) -> PromptFeatures:
        """A prompt as its model reads it. Raises PromptError, SettingsError."""
        self._check_settings(wished)
        if not isinstance(prompt, FeaturesPrompt):
            raise PromptError(
                f"the prompt is {_kind(prompt)}, and {self._whose} reads {self.reads}: give what "
                f"its processor returns, {{{self.reads!r}: …}}"
            )
        if prompt.name == AUDIO:
            prompt = self._heard(prompt)
        if prompt.name != self.reads:
            raise PromptError(
                f"the prompt is {prompt.name}, and {self._whose} reads {self.reads} "
                f"({self._shape.told()}); give what its own processor returns"
            )
        beginning = self._beginning(prompt, wished)  # cheap, so that its errors come first
        values = self._values(prompt.values)
        mask = self._mask(prompt.attention_mask, values)
        if self._shape.padded:
            values, mask = self._whole(values), None
        return PromptFeatures(self._shared(values, mask), beginning)

    def counted(self, wished: Wishes, features: PromptFeatures) -> Wishes:
        """What a request asks for, where Whisper's `max_length` does not count the beginning."""
        if self._whisper is None:
            return wished
        most = self._model.config.max_target_positions
        more = min(most // 2 - 1, len(features.beginning.ids))

        def longer(fields: Mapping[str, Any]) -> Mapping[str, Any]:
            length = fields.get("max_length")
            if type(length) is not int or length < 1:
                return fields
            return {**fields, "max_length": max(length, min(length + more, most))}

        return replace(wished, keywords=longer(wished.keywords), config=longer(wished.config))

    def _heard(self, prompt: FeaturesPrompt) -> FeaturesPrompt:
        """The features of a sound."""
        if self._sounds is None:
            raise PromptError(f"the prompt is {AUDIO}, and {self._whose} reads {self.reads}")
        if isinstance(self._sounds, str):
            raise PromptError(
                f"{AUDIO} is not heard here: {self._sounds}; or give {self.reads}, which the "
                "processor returns"
            )
        return self._sounds.read(prompt)

    @property
    def _whose(self) -> str:
        return type(self._model).__name__

    def _check_settings(self, wished: Wishes) -> None:
        given = wished.given
        for name in _OF_TOKENS:
            if name in given and not asks_for_nothing(name, given[name]):
                raise SettingsError(
                    f"{name}={quoted(given[name])}{wished.origin(name)} looks at tokens of the "
                    f"prompt, and {self._whose} reads {self.reads}; lift it with {name}=None"
                )
        if self._whisper is None:
            check_no_speech(wished, self._whose)

    def _beginning(self, prompt: FeaturesPrompt, wished: Wishes) -> Beginning:
        start = one_token(wished, START, self._vocab_size, self._start)
        if prompt.decoder_input_ids is None:
            return Beginning([start]) if self._whisper is None else self._whisper.of(wished, start)
        for name in OF_SPEECH:
            if wished.given.get(name) is not None:
                raise SettingsError(f"there are decoder_input_ids and {name}; give one of the two")
        ids = self._ids(prompt.decoder_input_ids)
        return Beginning(ids if self._begins_by_itself or ids[0] == start else [start, *ids])

    @property
    def _begins_by_itself(self) -> bool:
        """Whether nothing is put in front of what a caller says, as `generate` decides it."""
        encoder = getattr(self._model.config, "encoder", None)
        return self._whisper is not None or "donut" in str(getattr(encoder, "model_type", ""))

    @as_prompt_error
    def _ids(self, given: Any) -> list[int]:
        rows = listed(given)
        if isinstance(rows, list | tuple) and len(rows) == 1 and isinstance(rows[0], list | tuple):
            rows = rows[0]  # of a batch of one
        if not isinstance(rows, list | tuple) or not rows:
            raise PromptError(f"decoder_input_ids must be token ids, one at least, not {rows!r}")
        try:
            return [*token_ids(rows, "decoder_input_ids", self._vocab_size)]
        except SettingsError as error:
            raise PromptError(str(error)) from None

    @as_prompt_error
    def _values(self, given: Any) -> torch.Tensor:
        """A copy in the model's dtype. Raises PromptError for what the model does not read."""
        name, shape = self.reads, self._shape
        found = torch.as_tensor(given, device="cpu").detach()
        if not found.is_floating_point():
            raise PromptError(
                f"{name} are floating-point numbers, as the model's processor returns them, not "
                f"{str(found.dtype).removeprefix('torch.')}"
            )
        sizes = list(found.shape)
        along = -1 if shape.along is None else shape.along
        lacks = len(sizes) != len(shape.sizes) or any(
            at != along and size != sizes[at] for at, size in enumerate(shape.sizes)
        )
        length = 0 if lacks or along < 0 else sizes[along]
        if not lacks and along >= 0:
            lacks = not 0 < length <= shape.most or length % shape.multiple != 0
        if lacks:
            raise PromptError(
                f"{name} of a prompt has the shape {sizes}, and {self._whose} reads "
                f"{shape.told()}{self._advice(length)}"
            )
        if not bool(found.isfinite().all()):
            raise PromptError(f"{name} has a NaN or an infinite number; look at what it is made of")
        return found.to(self._model.dtype, copy=True).contiguous()

    def _advice(self, length: int) -> str:
        """What to do about a length that is not right."""
        if length > self._shape.most:
            return "; cut it into pieces of that length, and give each as a prompt"
        if length and length % self._shape.multiple:
            return f", a multiple of {self._shape.multiple}; pad it with zeros"
        return "; give what its own processor returns"

    @as_prompt_error
    def _mask(self, given: Any, values: torch.Tensor) -> torch.Tensor | None:
        """What says where padding begins; None where a caller says nothing."""
        if given is None:
            return None
        along = self._shape.along
        if along is None:
            raise PromptError(f"{self.reads} has no padding; drop attention_mask")
        found = torch.as_tensor(given, device="cpu")
        if found.dim() == 2 and len(found) == 1:
            found = found[0]
        if list(found.shape) != [values.shape[along]]:
            raise PromptError(
                f"attention_mask has the shape {list(found.shape)}, and {self.reads} is "
                f"{values.shape[along]} {self._shape.axes[along]} long; give one for each"
            )
        if not bool(((found == 0) | (found == 1)).all()):
            raise PromptError("attention_mask must be of 0 and 1")
        found = found.long()
        length = int(found.sum())
        if not length:
            raise PromptError(f"attention_mask leaves nothing of {self.reads}")
        if not bool(found[:length].all()):
            raise PromptError(
                "attention_mask has 0 before a 1; features are padded at the right, with "
                "padding_side='right' of the processor"
            )
        return found

    def _whole(self, values: torch.Tensor) -> torch.Tensor:
        """Features of a whole window, with zeros behind what was given."""
        along = self._shape.along
        assert along is not None
        sizes = [self._shape.most if at == along else n for at, n in enumerate(values.shape)]
        whole = values.new_zeros(sizes)
        whole.narrow(along, 0, values.shape[along]).copy_(values)
        return whole

    def _shared(self, values: torch.Tensor, mask: torch.Tensor | None) -> GivenFeatures:
        """Those of an equal prompt that somebody still waits for, or these."""
        digest = blake2b(repr((values.shape, values.dtype)).encode(), digest_size=16)
        for tensor in (values, mask):
            if tensor is not None:
                digest.update(tensor.view(torch.uint8).numpy().data)
            digest.update(b"|")
        key = digest.digest()
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = GivenFeatures(key, values, mask)
        return found


def check_no_speech(wished: Wishes, whose: str) -> None:
    """Raise SettingsError for what a request says of a sound, where no Whisper is told it."""
    for name in OF_SPEECH:
        value = wished.given.get(name)
        if name in KEYWORDS and KEYWORDS[name].asks_for_nothing(value):
            continue  # a pipeline's task, which is what is done anyway
        if value is not None:
            raise SettingsError(
                f"{name}={quoted(value)} is what Whisper is told, and {whose} is not; drop it"
            )


def check_no_features(prompt: Any, whose: str) -> None:
    """Raise PromptError for features, where the model reads text."""
    if isinstance(prompt, FeaturesPrompt):
        raise PromptError(
            f"the prompt is {prompt.name}, and {whose} reads text; give a text, token ids, or chat "
            "messages with their images"
        )


def _kind(prompt: Any) -> str:
    """What a prompt is that is no features."""
    if isinstance(prompt, str):
        return "a text"
    if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        return "a chat"
    if isinstance(prompt, Sequence) and len(prompt) and type(prompt[0]) is int:
        return "token ids"
    return "empty" if prompt is None or prompt == [] else type(prompt).__name__
