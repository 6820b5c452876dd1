"""Reads the weights of a plan: those of the model, and those of its draft model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.bridge.adapters import load_adapter
from jackfield.bridge.attention import decoder_configs
from jackfield.bridge.first_layers import first_layers
from jackfield.bridge.read_back import check_read
from jackfield.bridge.spreading import folder_for
from jackfield.bridge.weights import load_model, tensors_in
from jackfield.contracts import BindContext, Quantization
from jackfield.errors import UsageError
from jackfield.planning.assistance import FoundAssistant
from jackfield.planning.deciding import Job
from jackfield.planning.early_exit import EarlyExit
from jackfield.planning.planning import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Assistance:
    """A draft model with its weights, its plan and its tokenizer."""

    model: PreTrainedModel
    plan: Plan
    tokenizer: Any | None


#: The ids of configs that an engine has changed and will give back; models may share one.
in_use: set[int] = set()


def read_weights(job: Job, plan: Plan, files: ExitStack, tokenizer: Any | None) -> PreTrainedModel:
    """The model of `job`, loaded as planned; a live one as it is.

    Leaving `files` removes what was written to disk for it.
    """
    source = job.source
    if source.live is None:
        assert plan.placement is not None
        folder = files.enter_context(folder_for(plan.placement, job.asked.offload_folder))
        choice = plan["quantizer"]
        context = BindContext(
            model=None,
            config=source.config,
            requirements=plan.requirements,
            options=choice.options,
            tokenizer=tokenizer,
        )
        bound = choice.registered.bind(context)
        model = load_model(source, plan.requirements, plan.placement, bound, folder, job.shard)
        changes = bound.config is not None or bound.finish is not Quantization.finish
        if changes or plan.requirements.stored is not None:
            tensors = tensors_in(source)
            check_read(model, choice, plan.requirements, tensors, source.gguf, job.shard)
        if job.found is None or job.held(plan, 1) is not None:
            return model
        return load_adapter(model, job.found)
    check_free(source.live)
    if str(source.live.dtype).removeprefix("torch.") != plan.requirements.dtype:
        raise UsageError(
            f"the model is in {source.live.dtype} and is used as it is; convert it yourself, or "
            "drop dtype"
        )
    return source.live


def check_free(model: PreTrainedModel) -> None:
    """Raise UsageError where a live model runs in an engine."""
    if not in_use.isdisjoint(map(id, decoder_configs(model))):
        raise UsageError(
            "this model, or one that shares its config, already runs in an engine; close that one "
            "first, or give the model a config of its own"
        )


def read_assistant(
    found: FoundAssistant | EarlyExit,
    beside: PreTrainedModel,
    tokenizer: Any | None,
    files: ExitStack,
) -> Assistance:
    """Read a draft model's weights, unless it is part of the model `beside` it.

    Raises UsageError where it is the model to be assisted.
    """
    if isinstance(found, EarlyExit):
        return Assistance(first_layers(beside, found.layers), found.plan, tokenizer)
    model = read_weights(found.job, found.plan, files, found.tokenizer)
    if not set(map(id, decoder_configs(model))).isdisjoint(map(id, decoder_configs(beside))):
        raise UsageError(
            "assistant_model is the model itself, or shares its config; give another one, or a "
            "copy with a config of its own"
        )
    return Assistance(model, found.plan, found.tokenizer)
