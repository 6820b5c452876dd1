"""The draft model of assisted decoding: found, planned and checked before a weight is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from jackfield.bridge.source import ModelSource
from jackfield.bridge.tokenizer import Text, same_tokens
from jackfield.bridge.tokenizer_files import tokenizer_of
from jackfield.errors import JackfieldError, UsageError
from jackfield.planning.deciding import Job, resolve_job
from jackfield.planning.device_map import STRATEGIES
from jackfield.planning.early_exit import EarlyExit, planned_exit
from jackfield.planning.planning import Plan
from jackfield.planning.spec import PlanSpec
from jackfield.planning.strategies import exits_early
from jackfield.registry.discovery import registry
from jackfield.spelling import AUTO, nearest

logger = logging.getLogger("jackfield")

#: What `assistant={…}` may hold: arguments of `jackfield.load` that are the draft model's own.
KEYS = (
    "attn_implementation", "cache_implementation", "quantization", "device_map", "dtype",
    "revision", "tokenizer",
)  # fmt: skip


@dataclass(frozen=True)
class FoundAssistant:
    """A draft model that was found and planned; its weights are not read."""

    job: Job
    plan: Plan
    tokenizer: Any | None


def with_assistant(
    plan: Plan, job: Job, spec: PlanSpec
) -> tuple[Plan, FoundAssistant | EarlyExit | None]:
    """`plan` with that of its draft model, and this. Raises what `jackfield.plan` raises."""
    layers = _exits(plan, spec)
    if layers is None:
        helper: FoundAssistant | EarlyExit | None = _find(plan, spec, job.asked.device_map)
    else:
        helper = planned_exit(plan, job, spec.selections, _mapping(spec.assistant), layers)
    return plan if helper is None else replace(plan, assistant=helper.plan), helper


def _exits(plan: Plan, spec: PlanSpec) -> int | None:
    """At which layer of the model the draft model of `plan` ends; None: it is another model.

    Raises UsageError where its decodings need several draft models.
    """
    found = {
        name: exits_early(choice)
        for name, choice in plan.decodings.items()
        if choice.backend.capabilities.assistant
    }
    if len(set(found.values())) > 1:
        one, *_ = found
        other = next(name for name, layers in found.items() if layers != found[one])
        raise UsageError(
            f"the decodings {one!r} and {other!r} need two draft models, and an engine has one; "
            "load an engine for each"
        )
    layers = next(iter(found.values()), None)
    if layers is not None and spec.assistant_model is not None:
        raise UsageError(
            f"assistant_model is not used: the draft model of {next(iter(found))!r} is the model's "
            "own first layers; drop it, or assistant_early_exit"
        )
    return layers


def _find(plan: Plan, spec: PlanSpec, where: str | Mapping[str, str]) -> FoundAssistant | None:
    """Plan the draft model that the decodings of `plan` need. None: they need none.

    Raises UsageError where one is missing or nobody asks for it, and what `jackfield.plan` raises.
    """
    model, how = spec.assistant_model, spec.assistant
    needing = [n for n, c in plan.decodings.items() if c.backend.capabilities.assistant]
    if not needing:
        if model is not None or how is not None:
            stray = "assistant" if model is None else "assistant_model"
            raise UsageError(
                f"{stray} is used by none of the decodings ({', '.join(plan.decodings)}); choose "
                "decoding='assisted', or drop it"
            )
        return None
    if model is None:
        raise UsageError(
            f"decoding {needing[0]!r} needs a draft model; give assistant_model='…' (a hub id, a "
            "folder, or a live model)"
        )
    how = _checked(how)
    try:
        live = isinstance(model, PreTrainedModel)
        one = not live and isinstance(where, str) and where not in STRATEGIES
        own = {"device_map": where if one else AUTO} | dict(how)
        tokenizer = own.pop("tokenizer", None)
        helper = PlanSpec(**own)
        job = resolve_job(model, helper)
        job = replace(job, needs=replace(job.needs, rollback=True))
        found = job.decide(registry(), helper.selections)
        return FoundAssistant(job, found, tokenizer_of(tokenizer, job.source))
    except JackfieldError as error:
        raise type(error)(f"assistant_model: {error}") from error


def _mapping(how: Any) -> dict[str, Any]:
    if how is not None and not isinstance(how, Mapping):
        raise UsageError(f"assistant must be a mapping of arguments, not {how!r}")
    return dict(how or {})


def _checked(how: Any) -> Mapping[str, Any]:
    found = _mapping(how)
    for key in found:
        if key == "adapter":
            raise UsageError(
                "assistant has no key 'adapter'; give the draft model with it, as a live model: "
                "assistant_model=PeftModel.from_pretrained(…)"
            )
        if key not in KEYS:
            raise UsageError(
                f"assistant has no key {key!r} (keys: {', '.join(KEYS)}){nearest(str(key), KEYS)}"
            )
    return found


def check_vocabulary(source: ModelSource, tokenizer: Any | None, found: FoundAssistant) -> None:
    """Raise UsageError unless the draft model's tokens can be made the model's."""
    sizes = [one.vocab_size for one in (source, found.job.source)]
    if tokenizer is None or found.tokenizer is None:
        if sizes[0] != sizes[1]:
            without = "the model" if tokenizer is None else "the assistant model"
            raise UsageError(
                f"assistant_model has a vocabulary of {sizes[1]} tokens where the model has "
                f"{sizes[0]}, and {without} has no tokenizer to go from one to the other; choose a "
                "draft model with the same vocabulary, or give both a tokenizer"
            )
        return
    if (known := found.tokenizer.vocab_size) > sizes[1]:
        raise UsageError(
            f"assistant_model has a vocabulary of {sizes[1]} tokens where its tokenizer has {known}"
            "; give the tokenizer that it was trained with: assistant={'tokenizer': …}"
        )
    if not same_tokens(Text(tokenizer, sizes[0]), Text(found.tokenizer, sizes[1])):
        logger.info("the assistant model has a vocabulary of its own: drafts go by their text")
