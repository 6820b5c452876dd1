"""Assembles what runs a plan: backends are bound and checked, the loop and the worker made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jackfield.bridge.devices import settle
from jackfield.bridge.feature_encoder import FeatureEncoder
from jackfield.bridge.image_encoder import ImageEncoder, image_token
from jackfield.bridge.image_reader import ImageReader
from jackfield.bridge.model_layers import vocab_size_of
from jackfield.bridge.sounds import SoundReader
from jackfield.bridge.tokenizer import Text
from jackfield.devices import hand_back, input_device
from jackfield.engine.assistant import draft_model
from jackfield.engine.batch_limits import BatchLimits
from jackfield.engine.bound import BoundModel, install_all
from jackfield.engine.checked_schedule import CheckedSchedule
from jackfield.engine.decoder import Decoder, strategies_of
from jackfield.engine.introspection import Introspection
from jackfield.engine.leading import SharedCache, shared_forward
from jackfield.engine.loop import Loop
from jackfield.engine.mtp import HeadDrafts
from jackfield.engine.observer import Observer
from jackfield.engine.prompt_images import ImageIntake
from jackfield.engine.reading import Assistance
from jackfield.engine.step_features import StepFeatures
from jackfield.engine.step_images import StepImages
from jackfield.engine.verifying import Verification
from jackfield.engine.worker import Worker, linger_on
from jackfield.guarded import all_of
from jackfield.parallel.ranks import Leader
from jackfield.planning.beside import Beside
from jackfield.planning.planning import Plan
from jackfield.requests.wishes import notice_selectors
from jackfield.sampling.structured import Structures

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from jackfield.contracts import KVCache, ModelInputs


@dataclass(frozen=True)
class Assembly:
    """What runs a model. `restore` gives everything back as it was."""

    bound: BoundModel
    text: Text
    images: ImageIntake | None
    sounds: SoundReader | str | None
    structures: Structures
    introspection: Introspection
    loop: Loop
    observer: Observer
    worker: Worker
    restore: list[Callable[[], None]]


def assemble(
    model: PreTrainedModel,
    plan: Plan,
    tokenizer: Any | None,
    limits: BatchLimits,
    *,
    max_waiting: int | None,
    stall_after: float,
    verify: int,
    assistance: Assistance | None,
    heads: Any = None,
    leader: Leader | None = None,
    free: int | None = None,
    beside: Beside | None = None,
    images: ImageReader | str | None = None,
    sounds: SoundReader | str | None = None,
) -> Assembly:
    """Bind everything, then put it into place. Where one fails, the model is as it was.

    Of a model that several processes share, `leader` has the others, and `free` bytes are free in
    each of them. `heads` are the model's own for multi-token prediction. `beside` are the adapters
    that requests may name. `images` reads those of prompts, or says why none are read; None: of a
    model for text. `sounds` makes features of sounds, or says why nothing does; None: of a model
    that hears none.
    """
    offered = (choice.backend.capabilities.settings for choice in plan.decodings.values())
    whose = model.name_or_path or type(model).__name__
    notice_selectors(model.generation_config, frozenset().union(*offered), whose)
    text = Text(tokenizer, vocab_size_of(model))
    structures = Structures(tokenizer, text.vocab_size)
    bound = BoundModel(model, plan, *plan.room(), free, beside, limits.max_chunk_size)
    unused = partial(hand_back, input_device(model).type)
    held, restore = [bound.close], []  # what is given back where the rest fails
    try:
        scheduler = plan["scheduler"].registered
        bare = scheduler.bind(bound.context("scheduler"))
        schedule = CheckedSchedule(bare, str(scheduler), closely=not scheduler.own)
        draft = None if assistance is None else draft_model(assistance, bound, text)
        models = [bound] if draft is None else [bound, draft.bound]
        held += [one.close for one in models[1:]]
        drafting = None if heads is None else HeadDrafts(bound, heads)
        decoder = Decoder(*strategies_of(bound, draft, drafting, text.vocab_size), structures)
        loop = Loop(*_steps(bound, leader), decoder, schedule, limits)
        loop.overlaps = leader is None and bound.overlaps  # other processes are told what is fed
        intake = None if images is None else ImageIntake(images, image_token(model), limits.cuts)
        if isinstance(images, ImageReader):
            loop.images = StepImages(
                ImageEncoder(model, images.rules.token_types),
                bound.aside,
                forgets=plan.requirements.live,
                windows=images.windows(plan.requirements),
            )
        if isinstance(bound.encoder, FeatureEncoder):
            loop.images = StepFeatures(bound.encoder, bound.aside)
        if bound.adapters is not None:
            loop.adapting = bound.adapters.adapting
        # A backend that fails to bind must leave a live model as it was, so this comes last.
        restore = install_all(models)
        if drafting is not None:
            loop.heads = drafting
            restore.append(drafting.install())
        for one in models:
            settle(one.model)
            one.record(limits.max_batch_size)
        if leader is not None:
            leader.exchange("ready")
            leader.watch()
        verification = Verification(bound, loop, verify) if verify else None
        introspection = Introspection(bound)
        observer = Observer(plan, bound, loop, text, draft, verification, introspection)
        linger = linger_on(input_device(model).type)
        worker = Worker(loop, observer.delta, observer.mark, max_waiting, stall_after, linger)
    except BaseException:
        all_of([*restore, *held, unused])
        raise
    restore.append(structures.close)
    if isinstance(loop.images, StepImages):
        restore.append(loop.images.kept.clear)
    restore.append(unused)
    return Assembly(
        bound, text, intake, sounds, structures, introspection, loop, observer, worker, restore
    )


def _steps(
    bound: BoundModel, leader: Leader | None
) -> tuple[Callable[[ModelInputs], torch.Tensor], KVCache]:
    """The forward call and the cache of a loop, which `leader` has other processes do as well."""
    if leader is None:
        return bound.forward, bound.cache
    cache = SharedCache(bound.cache, leader)
    return shared_forward(bound.forward, cache, leader), cache
