"""Makes sequences that can run of a prompt and its settings; a wrong setting is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from jackfield.bridge.encoders import decoder_start, has_encoder
from jackfield.bridge.features import reads_features
from jackfield.bridge.lora import HeldLora
from jackfield.bridge.tokenizer import Text
from jackfield.contracts import Settings
from jackfield.devices import input_device, refuse_autocast
from jackfield.engine.assembly import Assembly
from jackfield.engine.prompt_features import (
    FeatureIntake,
    PromptFeatures,
    check_no_features,
    check_no_speech,
)
from jackfield.engine.prompt_images import PromptImages
from jackfield.engine.sequences import GuidedPair, RunningGroup, RunningSequence
from jackfield.engine.turns import Heard, Turn, Turns
from jackfield.errors import CacheFullError, PromptError, SettingsError
from jackfield.planning.planning import Plan
from jackfield.planning.strategies import elsewhere, pick, settings_of
from jackfield.registry.discovery import registry
from jackfield.requests.chat_settings import ChatSettings, chat_settings_of
from jackfield.requests.decoding_settings import check_width
from jackfield.requests.guidance import check_pair, named, one_row
from jackfield.requests.honouring import Limits, refuse_unhonoured
from jackfield.requests.settings import resolve
from jackfield.requests.token_settings import one_token
from jackfield.requests.vocabulary import START
from jackfield.requests.wishes import Wishes, wishes


class _Read(NamedTuple):
    """What a sequence begins with, what its encoder reads, and the images of its prompt."""

    ids: list[int]
    encoder_ids: list[int] | None = None
    images: PromptImages | None = None
    features: PromptFeatures | None = None


class Intake:
    """Makes the sequences of requests. Numbers them; may be called from several threads."""

    def __init__(self, assembly: Assembly) -> None:
        self._plan = assembly.bound.plan
        self._bound = assembly.bound
        self._model = assembly.bound.model
        self._text = assembly.text
        self.turns = Turns(assembly.text)
        self._structures = assembly.structures
        self._loop = assembly.loop
        self._limits = {
            name: _limits(self._text, self._plan, name) for name in self._plan.decodings
        }
        self._ids = itertools.count()
        #: what the decoder of an encoder's text begins with; None: the prompt is its own
        encodes = has_encoder(self._model.config)
        self._start = decoder_start(self._model, self._text.vocab_size) if encodes else None
        self._features: FeatureIntake | None = None
        if self._start is not None and reads_features(self._model.config):
            self._features = FeatureIntake(
                self._model, self._text.vocab_size, self._start, assembly.sounds
            )
        self._images = assembly.images
        self._introspection = assembly.introspection
        self._check_open = assembly.worker.check_open
        self._device = input_device(self._model).type  # not asked while a compiler reads the model

    @property
    def reads(self) -> str | None:
        """What the model calls the features that it reads; None: it reads text."""
        return None if self._features is None else self._features.reads

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raise SettingsError for settings that are wrong whatever the prompt."""
        _, wished, _, limits = self._wished(asked)
        resolve(wished, 1, limits)

    def check_surroundings(self) -> None:
        """Raise UsageError for what the calling thread asks of torch and no step would honour."""
        refuse_autocast(self._device)

    def sequence(
        self,
        prompt: Any,
        asked: Mapping[str, Any],
        *,
        streams: bool = True,
        before_image: Callable[[], None] | None = None,
    ) -> RunningSequence:
        """The one sequence of a request that has its own reader."""
        sequences = self.sequences(prompt, asked, streams=streams, before_image=before_image)
        if len(sequences) > 1:
            raise SettingsError(
                f"num_return_sequences={len(sequences)} has no single reader; use generate, or "
                "submit the prompt that many times"
            )
        return sequences[0]

    def sequences(
        self,
        prompt: Any,
        asked: Mapping[str, Any],
        number: int = 0,
        *,
        streams: bool,
        before_image: Callable[[], None] | None = None,
    ) -> list[RunningSequence]:
        """The sequences of a request, checked; the first one reads the prompt for all.

        What `before_image` raises before one of its images is opened is raised.
        """
        self._bound.check_unchanged()
        self.check_surroundings()
        chat, wished, decoding, limits = self._wished(asked)
        if prompt is None:  # maybe as it was given under a name that is answered
            refuse_unhonoured(wished, limits)
        read = self._read(prompt, chat, wished, before_image or self._check_open)
        ids, encoder_ids, images, features = read
        if self._features is not None and features is not None:
            wished = self._features.counted(wished, features)
        if images is not None:
            limits = replace(limits, image_tokens=images.num_tokens)
        settings = resolve(wished, len(ids), limits, number, encoder_ids)
        if "decoding" in wished.given and (
            reason := self._loop.decoding.strategies[decoding].refuse(len(ids))
        ):
            raise SettingsError(f"decoding={decoding!r}: {reason}")
        width = self._loop.decoding.width(settings)
        self._check_size(settings, len(ids), width)
        self._introspection.check(settings, len(ids), images=images is not None)
        adapter, settings = self._adapter(settings)
        if images is not None:
            settings = settings._replace(cache_salt=f"{images.salt} {settings.cache_salt}")
        turn = self.turns.turn(prompt, chat, settings, ids)
        made = self._made(read, settings, width, adapter, turn, streams=streams)
        if settings.guidance_scale != 1:
            if images is not None and self._images is not None:
                self._images.check_guided(images, len(ids))
            negative = self._negative(wished.given.get("negative_prompt"), chat, settings, ids)
            self._pair(made, negative)
        return made if width is None else RunningGroup(made, settings.num_return_sequences).outputs

    def _read(
        self, prompt: Any, chat: ChatSettings, wished: Wishes, before_image: Callable[[], None]
    ) -> _Read:
        """What a sequence begins with, and what else is read.

        Raises PromptError, and SettingsError for a beginning that is no token.
        """
        needs, images = self._plan.requirements, None
        if self._features is not None:
            chat.refuse_without_chat()
            features = self._features.taken(prompt, wished)
            return _Read([*features.beginning.ids], features=features)
        check_no_features(prompt, needs.architecture)
        check_no_speech(wished, needs.architecture)
        if self._start is None:
            if self._images is None:
                return _Read(self._text.encode(prompt, needs.context_length, chat))
            prompt, images = self._images.taken(prompt, needs.context_length, before_image)
            places = None if images is None else self._images.places(images)
            ids = self._text.encode(prompt, needs.context_length, chat, places)
            if images is not None:
                self._images.settle(images, ids)
            return _Read(ids, None, images)
        most = needs.encoder_length
        ids = self._text.encode(prompt, most, chat)
        if most is not None and len(ids) > most:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, and the model's encoder reads {most} at most; "
                "shorten it"
            )
        return _Read([one_token(wished, START, self._text.vocab_size, self._start)], ids)

    def _check_size(self, settings: Settings, length: int, width: int | None) -> None:
        """Raise SettingsError or CacheFullError for a request that can never be held."""
        copies = () if width is None else (width,)
        if width is not None:
            places = self._loop.limits.max_batch_size
            check_width(width, settings.num_return_sequences, self._text.vocab_size, places)
        if reason := self._loop.cache.refuse(length, settings.max_new_tokens, *copies):
            raise CacheFullError(f"{self._plan['cache'].registered.name}: {reason}")

    def _adapter(self, settings: Settings) -> tuple[HeldLora | None, Settings]:
        """The adapter of a request, which then caches for itself. Raises SettingsError."""
        held = self._bound.adapters
        if settings.adapter is not None and (held is None or held.use() is not None):
            raise SettingsError(
                f"adapter={settings.adapter!r}: the model was loaded without adapters that a "
                "request could name; load it with adapters={'NAME': 'FOLDER'}"
            )
        return (None, settings) if held is None else held.asked(settings)

    def _made(
        self,
        read: _Read,
        settings: Settings,
        width: int | None,
        adapter: HeldLora | None,
        turn: Turn | None,
        *,
        streams: bool,
    ) -> list[RunningSequence]:
        """One sequence for each sample; of a search as many as there can be beams."""
        made: list[RunningSequence] = []
        reads = self._text.tokenizer is not None and (streams or bool(settings.stop_strings))
        for sample in range(width or settings.num_return_sequences):
            if sample and settings.watermark is not None:  # which remembers its text
                settings = settings._replace(watermark=copy(settings.watermark))
            running = RunningSequence(
                next(self._ids),
                read.ids,
                settings,
                self._text.detokenizer(settings) if reads else None,
                leader=made[0] if made and width is None else None,
                sample=sample,
                streams=streams,
                adapter=adapter,
                heard=None if turn is None else Heard(turn, sample),
                encoder_ids=read.encoder_ids,
                images=read.images,
                features=read.features,
            )
            if settings.structure is not None:
                ends = settings.eos_token_ids
                running.constraint = self._structures.start(settings.structure, ends)
            made.append(running)
        return made

    def _negative(
        self, prompt: Any, chat: ChatSettings, settings: Settings, ids: list[int]
    ) -> list[int]:
        """The tokens of a request's negative prompt; without one, the last one of its prompt.

        Raises PromptError for one that cannot be read, SettingsError and CacheFullError for a
        request that can never run as two sequences.
        """
        if self._start is not None:
            raise SettingsError(
                f"guidance_scale={settings.guidance_scale:g} leads away from another prompt, and "
                "here an encoder reads prompts; drop it"
            )
        needs, negative = self._plan.requirements, ids[-1:]
        if prompt is not None:
            with named():
                row, chat = one_row(prompt, chat)
                negative = self._text.encode(row, needs.context_length, chat)
        lengths = len(ids), len(negative)
        check_pair(settings, lengths, needs, self._loop.limits.max_batch_size)
        if reason := self._loop.cache.refuse(max(lengths), settings.max_new_tokens, 2):
            raise CacheFullError(f"{self._plan['cache'].registered.name}: {reason}")
        return negative

    def _pair(self, made: list[RunningSequence], negative: list[int]) -> None:
        """Give each text of a request a sequence of the negative prompt beside it."""
        first: RunningSequence | None = None
        for one in made:
            beside = RunningSequence(
                next(self._ids), negative, one.settings,
                leader=first, sample=one.sample, adapter=one.adapter,
            )  # fmt: skip
            first = first or beside
            GuidedPair(one, beside)

    def _wished(self, asked: Mapping[str, Any]) -> tuple[ChatSettings, Wishes, str, Limits]:
        """What is said of a chat and asked for beside it, by which decoding, within what."""
        chat, asked = chat_settings_of(asked)
        wished = wishes(asked, self._model.generation_config)
        decoding = pick(self._plan.decodings, wished)
        return chat, wished, decoding, self._limits[decoding]


def _limits(text: Text, plan: Plan, decoding: str) -> Limits:
    """What the settings of requests that take this decoding are checked against."""
    decodings = plan.decodings
    return Limits(
        vocab_size=text.vocab_size,
        context_length=plan.requirements.context_length,
        honoured=settings_of(decodings[decoding]),
        decoding=decoding,
        has_tokenizer=text.tokenizer is not None,
        elsewhere=lambda name: elsewhere(registry(), decodings, name),
    )
