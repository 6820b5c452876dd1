"""Whether the prompts of an engine may have images, and what reads them."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from jackfield.bridge.image_hosts import ImageHosts, hosts_of
from jackfield.bridge.image_reader import (
    ImageReader,
    check_takes_images,
    class_of,
    lacks,
    processor_of,
    reads_images,
)
from jackfield.bridge.image_trial import BOTH_WAYS, TOGETHER, tried_with_images
from jackfield.contracts import Attention
from jackfield.errors import UsageError

if TYPE_CHECKING:
    from jackfield.bridge.source import ModelSource
    from jackfield.contracts import Requirements
    from jackfield.planning.planning import Plan
    from jackfield.planning.spec import LoadSpec

logger = logging.getLogger("jackfield")


def reader_for(source: ModelSource, plan: Plan, spec: LoadSpec) -> ImageReader | str | None:
    """What reads the images of prompts, or why none are read; None: the model reads text only.

    Raises UsageError for `image_hosts` that are none, or that a model for text has no use for.
    """
    hosts = hosts_of(spec.image_hosts)
    if not reads_images(source):
        if hosts is not None:
            raise UsageError(
                f"{plan.requirements.architecture} reads no images, so there is nothing to fetch; "
                "drop image_hosts"
            )
        return None
    found = _found(source, plan, spec, hosts)
    if isinstance(found, str):
        logger.info("prompts have no images: %s", found)
    return found


def _found(
    source: ModelSource, plan: Plan, spec: LoadSpec, hosts: ImageHosts | None
) -> ImageReader | str:
    cls, needs = class_of(source), plan.requirements
    if reason := _without(needs, spec):
        return reason
    if reason := check_takes_images(cls, source.config):
        return reason
    try:
        processor = processor_of(spec.tokenizer, source)
    except UsageError as error:
        return str(error)
    if reason := lacks(processor):
        return reason
    reader = ImageReader(processor, hosts=hosts)
    ragged = not (needs.ragged or needs.pieces)
    packed = needs.layout == "packed"
    trial = partial(tried_with_images, source.config, cls, reader, ragged=ragged, packed=packed)
    found = trial()
    if found == TOGETHER:
        found = trial(alone=TOGETHER)
    if isinstance(found, str):
        return found
    both_ways = found.token_types is not None or found.blocks_in
    if both_ways and (reason := _looks_back_only(plan, spec)):
        return reason
    reader.rules = found
    return reader


def _looks_back_only(plan: Plan, spec: LoadSpec) -> str | None:
    """Why an image's tokens do not see one another; None: they do.

    In the padded layout prompts are read whole, with the mask that a model makes for them. Pages
    say it to an attention that reads it.
    """
    packed, attention = plan.requirements.layout == "packed", plan["attention"].registered
    if spec.prefill_chunk_size is not None and not packed:
        return (
            f"{BOTH_WAYS}, and prefill_chunk_size={spec.prefill_chunk_size} cuts prompts; drop it, "
            "or load it with cache_implementation='paged'"
        )
    assert isinstance(attention.backend, Attention)
    needed = "bidirectional_blocks" if packed else "bidirectional_prefix"
    if needed not in attention.backend.capabilities.features:
        return (
            f"{BOTH_WAYS}, and the attention {attention.name!r} looks back only ({needed}); load "
            "it with attn_implementation='sdpa'"
        )
    return None


def _without(needs: Requirements, spec: LoadSpec) -> str | None:
    """What of a job images do not go with."""
    if spec.verify:
        return "verify computes the model again from tokens alone; drop it"
    if needs.tp_size > 1:
        return f"they are read in one process, and tp_size={needs.tp_size} shares the model"
    if needs.request_adapters or spec.adapters is not None:
        return "what the model says of an image is kept for all requests, whatever their adapter"
    if needs.adapter is not None and not needs.merge_adapter:
        return (
            "what the model says of an image is kept, and the adapter can be switched off; load it "
            "with merge_adapter=True"
        )
    return None
