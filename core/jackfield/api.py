"""The front door: `plan` decides, `load` decides and then reads the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_type_hints

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from jackfield.bridge.weights import tokenizer_of
from jackfield.engine.bounds import Bounds, bounds_for, check_seconds, check_sizes
from jackfield.engine.engine import Engine
from jackfield.engine.reading import read_assistant, read_weights
from jackfield.errors import UsageError
from jackfield.planning.assistance import FoundAssistant, Model, check_vocabulary, find_assistant
from jackfield.planning.deciding import Job, understand
from jackfield.planning.device_map import DeviceMap
from jackfield.planning.memory import STEP_ROWS
from jackfield.planning.planning import Plan
from jackfield.planning.solving import ARGUMENTS
from jackfield.planning.strategies import Strategies
from jackfield.planning.wording import in_our_words
from jackfield.registry.discovery import registry
from jackfield.requests.surroundings import refuse_autocast
from jackfield.spelling import AUTO, Quantizable, Selectable


class PlanArguments(TypedDict, total=False):
    """What `jackfield.plan` takes beside the model; what is left out is "auto" or None."""

    attn_implementation: Selectable
    cache_implementation: Selectable
    quantization: Quantizable
    decoding: Strategies
    assistant_model: Model | None
    assistant: Mapping[str, Any] | None
    scheduler: Selectable
    compile: Selectable | bool
    kernels: Selectable
    dtype: Any
    device_map: DeviceMap
    max_memory: Mapping[str | int, str | int] | None
    offload_folder: str | Path | None
    adapter: str | Path | None
    merge_adapter: bool
    revision: str | None
    deterministic: bool


class LoadArguments(PlanArguments, total=False):
    """What `jackfield.load` takes beside the model."""

    tokenizer: Any
    max_batch_size: int
    max_batch_tokens: int | None
    prefill_chunk_size: int | None
    max_waiting: int | None
    stall_after: float


OF_A_PLAN = frozenset(get_type_hints(PlanArguments))
_OF_LOADING = frozenset(get_type_hints(LoadArguments))


def load(
    model: str | Path | PreTrainedModel | None = None, **arguments: Unpack[LoadArguments]
) -> Engine:
    """Decide, load, bind.

    `model` is a hub id, a folder, "demo" (the model inside the package) or a live transformers
    model, which is given back as it was when the engine is closed. Each selection is "auto",
    ``plugin:name``, ``plugin:distribution/name``, with ``?option=value`` at its end, or a list of
    these (declared fallbacks); a bare name means the same as ``plugin:name``. `quantization` may
    also be one of transformers' quantization config objects. `kernels` are fused layers, all that
    are named; "auto" is none. `compile` may also be a bool. `dtype` is "auto", a name such as
    "bfloat16" or a torch.dtype.

    None is the same as leaving an argument out. Keywords of `from_pretrained` and `pipeline` are
    taken where they mean one of these, and otherwise answered with what to write: see
    `jackfield.requests.habits`.

    `device_map` is "auto" (the best single device that holds the weights, otherwise several, then
    the CPU, then disk), "balanced", "balanced_low_0" or "sequential" (accelerate's), a device, or a
    dict of module -> device or "disk". `max_memory` bounds what weights take of each device
    (``{"cpu": "4GB", 0: "10GB"}``). What transformers has to write for weights on disk goes into a
    folder of its own in `offload_folder`, or among the temporary ones, until the engine is closed.
    `adapter` is a folder or hub id of a PEFT adapter; with `merge_adapter` it is added into the
    weights.

    `decoding` may also be a mapping of names to selections, which requests choose from by the
    setting of that name; the first is the default, and plain decoding is always among them.
    `assistant_model` is the draft model of a decoding that needs one, and `assistant` holds
    arguments that are its own: selections, `dtype`, `device_map`, `revision`, `tokenizer`.

    `max_batch_size` is how many sequences run together at most, `max_batch_tokens` how many tokens
    one step computes at most (None: 2048 in the packed layout; the padded one has no bound),
    `prefill_chunk_size` how many tokens of each prompt (None: as many as the step has room for).
    `max_waiting` is how many requests may wait; None: any number. With `deterministic`,
    log-probabilities are the same to the last bit whatever else runs. A step that takes longer
    than `stall_after` seconds counts as stalled.

    Raises a UsageError (SelectionError, OptionError, PlanError, CheckpointError) before any
    weight is loaded, or CheckpointError where the weights themselves are broken.
    """
    return prepare(model, **arguments).load()


def plan(
    model: str | Path | PreTrainedModel | PreTrainedConfig | None = None,
    **arguments: Unpack[PlanArguments],
) -> Plan:
    """Decide, without loading a weight, what `jackfield.load` would run with these arguments.

    `model` is a hub id, a folder, "demo", a config, or a live model. Raises the errors that
    `load` would raise.
    """
    if later := [name for name in arguments if name in _OF_LOADING - OF_A_PLAN]:
        raise UsageError(
            f"jackfield.plan takes no {later[0]}, which chooses no backend; give it to "
            "jackfield.load"
        )
    return planned(model, arguments)


def planned(model: Any, arguments: Mapping[str, Any], device_memory: int | None = None) -> Plan:
    """What `jackfield.plan` decides with these arguments.

    `device_memory` None: for this machine. Otherwise for one device of so many bytes, which need
    not be here.
    """
    words = in_our_words(arguments, OF_A_PLAN, "jackfield.plan")
    _check_given(model, "jackfield.plan")
    _, plan, _ = _decided(model, **words, device_memory=device_memory)
    return plan


@dataclass(frozen=True)
class Prepared:
    """All that `jackfield.load` decides and checks before it reads weights."""

    job: Job
    plan: Plan
    assistant: FoundAssistant | None
    tokenizer: Any | None
    bounds: Bounds
    max_waiting: int | None
    stall_after: float

    def load(self) -> Engine:
        """Read the weights and bind. Raises UsageError inside of `torch.autocast`."""
        refuse_autocast(torch.device(self.plan.requirements.device or "cpu").type)
        with contextlib.ExitStack() as files:
            model = read_weights(self.job, self.plan, files, self.tokenizer)
            draft = None if self.assistant is None else read_assistant(self.assistant, model, files)
            engine = Engine(
                model,
                self.plan,
                self.tokenizer,
                self.bounds,
                max_waiting=self.max_waiting,
                stall_after=self.stall_after,
                assistance=draft,
            )
            engine.when_closed(files.pop_all().close)
        return engine


def prepare(model: Any, **arguments: Any) -> Prepared:
    """What `jackfield.load` does with these arguments, up to the weights. Raises what it raises."""
    words = in_our_words(arguments, _OF_LOADING, "jackfield.load")
    _check_given(model, "jackfield.load")
    return _prepared(model, **words)


def _check_given(model: Any, call: str) -> None:
    if model is None:
        raise UsageError(f"there is no model; write {call}('MODEL'), with a hub id or a folder")


def _prepared(
    model: Any,
    *,
    tokenizer: Any | None = None,
    max_batch_size: int = STEP_ROWS,
    max_batch_tokens: int | None = None,
    prefill_chunk_size: int | None = None,
    max_waiting: int | None = None,
    stall_after: float = 60.0,
    **arguments: Any,
) -> Prepared:
    if isinstance(model, PreTrainedConfig):
        raise UsageError("a config has no weights; jackfield.plan takes one, load takes a model")
    check_sizes(
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        prefill_chunk_size=prefill_chunk_size,
        max_waiting=max_waiting,
    )
    check_seconds(stall_after=stall_after)
    job, plan, helper = _decided(model, **arguments)
    if prefill_chunk_size is not None and (reason := job.needs.whole_prompt):
        raise UsageError(
            f"prefill_chunk_size={prefill_chunk_size}: {job.needs.architecture} reads a prompt in "
            f"one piece ({reason}); drop prefill_chunk_size"
        )
    bounds = bounds_for(plan, max_batch_size, max_batch_tokens, prefill_chunk_size)
    tokenizer = tokenizer_of(tokenizer, job.source)
    if helper is not None:
        check_vocabulary(job.source, tokenizer, helper)
    return Prepared(job, plan, helper, tokenizer, bounds, max_waiting, stall_after)


def _decided(
    model: Any,
    *,
    assistant_model: Model | None = None,
    assistant: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> tuple[Job, Plan, FoundAssistant | None]:
    """The job, its plan, and the draft model of that."""
    selections = {kind: arguments.pop(name, AUTO) for kind, name in ARGUMENTS.items()}
    job = understand(model, **arguments)
    plan = job.decide(registry(), selections)
    helper = find_assistant(plan, assistant_model, assistant, job.asked.device_map)
    return job, plan if helper is None else replace(plan, assistant=helper.plan), helper
