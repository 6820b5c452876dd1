"""`plan` decides what would run; `load` decides, then reads the weights and binds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from jackfield.bridge.image_reader import ImageReader
from jackfield.bridge.mtp import read_heads
from jackfield.bridge.sounds import SoundReader, sound_reader
from jackfield.bridge.tokenizer_files import tokenizer_of
from jackfield.devices import refuse_autocast
from jackfield.engine.batch_limits import BatchLimits, check_limits, limits_for
from jackfield.engine.bound import BoundModel
from jackfield.engine.engine import Engine
from jackfield.engine.following import follow
from jackfield.engine.reading import read_assistant, read_weights
from jackfield.engine.sharing import agree, agreed_bytes, prove, together
from jackfield.engine.verifying import check_verifiable, steps_of
from jackfield.errors import UsageError
from jackfield.parallel.ranks import Follower, Leader
from jackfield.paths import check_here
from jackfield.planning.assistance import FoundAssistant, check_vocabulary, with_assistant
from jackfield.planning.deciding import Job, resolve_job
from jackfield.planning.early_exit import EarlyExit
from jackfield.planning.images import reader_for
from jackfield.planning.keywords import in_our_words
from jackfield.planning.locking import check as check_lock
from jackfield.planning.locking import opened
from jackfield.planning.planning import Plan
from jackfield.planning.profiles import check_architecture, compared, of_profile, taken
from jackfield.planning.spec import LoadSpec, PlanSpec
from jackfield.registry.discovery import registry
from jackfield.requests.arguments import OF_A_PLAN, OF_LOADING, LoadArguments, PlanArguments


def load(
    model: str | Path | PreTrainedModel | None = None, **arguments: Unpack[LoadArguments]
) -> Engine:
    """Decide, load, bind.

    `model` is a hub id, a folder, a GGUF file (here or OWNER/REPOSITORY/FILE.gguf of the hub),
    "demo" (the model inside the package) or a live transformers model, which is given back as it
    was when the engine is closed. Each selection is "auto", ``plugin:name``,
    ``plugin:distribution/name``, with ``?option=value`` at its end, or a list of these (declared
    fallbacks); a bare name means the same as ``plugin:name``. `quantization` may also be one of
    transformers' quantization config objects. `kernels` are fused layers, all that
    are named; "auto" takes some where steps of a GPU are recorded, "none" takes none. `compile` may
    also be a bool. `dtype` is "auto", a name such as "bfloat16" or a torch.dtype.

    None is the same as leaving an argument out. Keywords of `from_pretrained` and `pipeline` are
    taken where they mean one of these, and otherwise answered with what to write: see
    `jackfield.requests.habits`.

    `device_map` is "auto" (the best single device that holds the weights, otherwise several, then
    the CPU, then disk), "balanced", "balanced_low_0" or "sequential" (accelerate's), a device, or a
    dict of module -> device or "disk". `max_memory` bounds what weights take of each device
    (``{"cpu": "4GB", 0: "10GB"}``). What transformers has to write for weights on disk goes into a
    folder of its own in `offload_folder`, or among the temporary ones, until the engine is closed.
    `adapter` is a folder or hub id of a PEFT adapter; with `merge_adapter` it is added into the
    weights. `adapters` maps names to LoRAs, of which each request names one or none by the setting
    `adapter`; they run in one batch, and more come and go (`Engine.load_adapter`), `max_adapters`
    at a time.

    `decoding` may also be a mapping of names to selections, which requests choose from by the
    setting of that name; the first is the default, and plain decoding is always among them.
    `assistant_model` is the draft model of a decoding that needs one, and `assistant` holds
    arguments that are its own: selections, `dtype`, `device_map`, `revision`, `tokenizer`.

    `max_batch_size` is how many sequences run together at most, `max_batch_tokens` how many tokens
    one step computes at most (None: 2048 in the packed layout; the padded one has no bound),
    `prefill_chunk_size` how many tokens of each prompt (None: as many as the step has room for).
    While a request is streamed, prompts get as much of a step as lets it take
    `target_step_seconds` (None: 0.05, and no target where `max_batch_tokens` is named or steps
    cannot be cut; inf: no target).
    `max_waiting` is how many requests may wait; None: any number. With `deterministic`,
    log-probabilities are the same to the last bit whatever else runs. A step that takes longer
    than `stall_after` seconds counts as stalled. `image_hosts` are those from which images of chats
    are fetched, each "HOST" (https) or "http://HOST:PORT"; without it none are.

    `tp_size` processes share the model (tensor parallelism), each on a device of its own; this one
    starts the others, which load with the same arguments. Under torchrun, `tp_plan="auto"` shares
    it among all processes: in rank 0 `load` returns the engine, in the others it follows that
    engine until it is closed, and then ends the process (SystemExit). With `expert_parallel` each
    process has some of a mixture's experts as a whole, where otherwise it has a part of each.
    Raises ExecutionError where the processes do not meet.

    `locked` is a file that `jackfield lock` wrote: selections that are left to "auto" are those in
    it, and a plan with any other backend, option, file, kernel or library is a PlanError.

    `profile` is a file that `jackfield tune` wrote: selections, dtype, device and sizes of a batch
    that are left open are those in it. Versions, hardware, a config or selections that are not
    those it was measured with are one warning; another architecture is a UsageError.

    With `verify`, the first 8 steps (or as many as it says) are compared with the same model
    computed again without any backend, one sequence at a time: queries, keys and values that are
    read, and outputs of each layer's attention, and logits. A step that is off ends with a
    PluginError that names backend, layer, position and size. Each costs two forward calls over all
    tokens of up to 4 sequences; `Engine.report` says how long it took.

    Raises a UsageError (SelectionError, OptionError, PlanError, CheckpointError) before any
    weight is loaded, or CheckpointError where the weights themselves are broken.
    """
    return prepare(model, **arguments).load()


def plan(
    model: str | Path | PreTrainedModel | PreTrainedConfig | None = None,
    **arguments: Unpack[PlanArguments],
) -> Plan:
    """Decide, without loading a weight, what `jackfield.load` would run with these arguments.

    `model` is a hub id, a folder, a GGUF file, "demo", a config, or a live model. Raises the
    errors that `load` would raise.
    """
    if later := [name for name in arguments if name in OF_LOADING - OF_A_PLAN]:
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
    spec = PlanSpec(**taken(words, OF_A_PLAN), device_memory=device_memory)
    _, plan, _ = _decided(model, spec)
    if spec.profile is not None:  # whose sizes this call does not take, and `load` will
        with of_profile(spec.profile.with_sizes):
            limits_for(plan, LoadSpec(**spec.profile.sizes))
    return plan


def prepare(model: Any, **arguments: Any) -> Prepared:
    """What `jackfield.load` does with these arguments, up to the weights. Raises what it raises."""
    words = in_our_words(arguments, OF_LOADING, "jackfield.load")
    spec = LoadSpec(**taken(words, OF_LOADING))
    _check_given(model, "jackfield.load")
    if isinstance(model, PreTrainedConfig):
        raise UsageError("a config has no weights; jackfield.plan takes one, load takes a model")
    check_limits(spec)
    steps_of(spec.verify)
    job, plan, helper = _decided(model, spec)
    with of_profile(spec.profile):
        limits = limits_for(plan, spec)
    if spec.verify:
        check_verifiable(plan)
    plan = plan.limited(limits.max_batch_tokens, limits.max_batch_size)
    tokenizer = tokenizer_of(spec.tokenizer, job.source)
    if spec.tokenizer is not None and job.source.gguf is not None:
        job.source.gguf.compare(tokenizer)
    if isinstance(helper, FoundAssistant):
        check_vocabulary(job.source, tokenizer, helper)
    images = reader_for(job.source, plan, spec)
    sounds = sound_reader(spec.tokenizer, job.source)
    given = {"model": model, **arguments}
    return Prepared(job, plan, helper, tokenizer, images, sounds, limits, spec, given)


def _decided(model: Any, spec: PlanSpec) -> tuple[Job, Plan, FoundAssistant | EarlyExit | None]:
    """The job, its plan and its draft model. Raises PlanError for a plan that was not locked."""
    with of_profile(spec.profile):
        spec, lock = opened(spec, registry())
        job = resolve_job(model, spec)
        check_architecture(spec.profile, job.needs.architecture)
        plan, helper = with_assistant(job.decide(registry(), spec.selections), job, spec)
    if lock is not None:
        check_lock(plan, lock)
    return job, compared(spec.profile, plan, job.source.config), helper


def _check_given(model: Any, call: str) -> None:
    check_here()
    if model is None:
        raise UsageError(f"there is no model; write {call}('MODEL'), with a hub id or a folder")


@dataclass(frozen=True)
class Prepared:
    """All that `jackfield.load` decides and checks before it reads weights."""

    job: Job
    plan: Plan
    assistant: FoundAssistant | EarlyExit | None
    tokenizer: Any | None
    images: ImageReader | str | None
    sounds: SoundReader | str | None
    limits: BatchLimits
    spec: LoadSpec
    given: Mapping[str, Any]

    def load(self) -> Engine:
        """Read the weights and bind. Raises UsageError inside of `torch.autocast`.

        Of a model that several processes share, in another rank than 0: follow rank 0 until it
        closes its engine, then raise SystemExit.
        """
        device = torch.device(self.plan.device or "cpu")
        refuse_autocast(device.type)
        with contextlib.ExitStack() as files:
            shared = None
            if self.job.shard is not None:
                shared = files.enter_context(together(self.job.shard, device, self.given))
                agree(shared, self.plan, self.job, registry())
                prove(shared, self.plan, self.job.source, self.job.shard)
            model = read_weights(self.job, self.plan, files, self.tokenizer)
            free = None if shared is None else agreed_bytes(shared, device)
            beside = self.job.held(self.plan, self.spec.max_adapters)
            if isinstance(shared, Follower):
                room, chunk = self.plan.room(), self.limits.max_chunk_size
                follow(BoundModel(model, self.plan, *room, free, beside, chunk), shared)
            draft = (
                None
                if self.assistant is None
                else read_assistant(self.assistant, model, self.tokenizer, files)
            )
            engine = Engine(
                model,
                self.plan,
                self.tokenizer,
                self.limits,
                max_waiting=self.spec.max_waiting,
                stall_after=self.spec.stall_after,
                verify=steps_of(self.spec.verify),
                assistance=draft,
                heads=None if self.plan.heads is None else read_heads(model, self.job.source),
                leader=shared if isinstance(shared, Leader) else None,
                free=free,
                beside=beside,
                images=self.images,
                sounds=self.sounds,
            )
            engine.when_closed(files.pop_all().close)
        return engine
