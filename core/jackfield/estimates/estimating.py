"""What a model takes of a device, and how fast that lets it decode, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jackfield.bridge.step_reads import StepReads, Table
from jackfield.contracts import Requirements
from jackfield.contracts.quantizing import plain_bytes
from jackfield.contracts.requirements import BYTES, DTYPES
from jackfield.devices import free_bytes
from jackfield.engine.batch_limits import check_sizes
from jackfield.errors import UsageError
from jackfield.estimates.backend_sizes import (
    requests_by_cache,
    weights_by_quantizer,
)
from jackfield.estimates.estimate import FAR, Estimate, StepBytes
from jackfield.estimates.hardware import hardware
from jackfield.planning.memory import STEP_ROWS, STEP_TOKENS
from jackfield.planning.planning import Plan
from jackfield.spelling import AUTO
from jackfield.units import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from jackfield.bridge.dry_run import DryRun
    from jackfield.registry.backends import Choice


_LENGTHS = (1024, 4096, 16384, 65536)


def estimate(
    model: str | Path | PreTrainedModel | PreTrainedConfig,
    *,
    device_memory: str | int | None = None,
    bandwidth: str | float | None = None,
    lengths: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (1, 8, 32),
    prefill_tokens: int | None = None,
    replicas: int = 1,
    revision: str | None = None,
    prompt_flops: bool = False,
    **selections: Any,
) -> Estimate:
    """What `jackfield.load` with these selections would take. Reads no weight.

    `model` is as for `jackfield.plan`; of a live model only the config counts. `device_memory` is
    a size such as "24GB", or bytes; None: what is free on the device now. `bandwidth` is a rate
    such as "3.35TB/s", or bytes a second. `lengths` are tokens of a request, prompt and new ones
    together. `prefill_tokens` is how many tokens of prompts a step feeds at most; None: what an
    engine does (2048 in the packed layout, all of them in the padded one). `replicas` engines
    have a device each, or as many as `tp_size`. With `prompt_flops` the operations of a prompt are
    counted, as they always are for a data sheet. `selections` are those of `jackfield.plan`; of
    them `device_map` may also be the name of a data sheet, such as "h200", whose memory and
    bandwidth count where no other are given. Raises UsageError and the errors of `jackfield.plan`.
    """
    sheet = hardware(selections.get("device_map"))
    if sheet is not None:
        selections["device_map"] = sheet.kind
        device_memory = sheet.memory if device_memory is None else device_memory
        bandwidth = sheet.bandwidth if bandwidth is None else bandwidth
    rate = None if bandwidth is None else parse_bandwidth(bandwidth)
    size = None if device_memory is None else parse_bytes(device_memory, "device_memory")
    check_sizes(prefill_tokens=prefill_tokens)
    _check_each(batch_sizes=batch_sizes, lengths=lengths or (), replicas=(replicas,))
    from jackfield.bridge.dry_run import DryRun  # and so torch, once the call is found right

    config, planned = _planned(model, revision, selections, size)
    needs, cache, quantizer = planned.requirements, planned["cache"], planned["quantizer"]
    sized = quantizer.registered.size("weight_bytes", needs, quantizer.options)
    tokens = _lengths(lengths, needs.context_length)
    limit = prefill_tokens or (STEP_TOKENS if needs.layout == "packed" else None)
    scores = planned["attention"].backend.capabilities.materializes_scores
    memory = _free(needs) if size is None else size
    left = memory - needs.weight_bytes - planned.limited(limit, STEP_ROWS).step_bytes()
    dry = DryRun(config, needs, materializes_scores=scores)
    return Estimate(
        plan=planned,
        device_memory=memory,
        given=size is not None,
        lengths=tokens,
        batch_sizes=tuple(batch_sizes),
        dtypes={name: plain_bytes(replace(needs, dtype=name)) for name in DTYPES},
        weights=tuple(weights_by_quantizer(planned)),
        caches=tuple(requests_by_cache(planned, tokens)),
        steps=_probe(dry, tokens, limit),
        reads=_with_own_head(dry.reads(), needs, quantizer),
        weights_known=sized is not None,
        checkpoint_bytes=_checkpoint_bytes(config, needs),
        pool=cache.registered.size("pool_of", needs, cache.options, max(0, left)),
        step_limit=limit,
        bandwidth=rate,
        flops=sheet.flops if sheet else None,
        prompt=dry.prompt_flops() if sheet or prompt_flops else None,
        replicas=replicas,
    )


def _with_own_head(
    reads: StepReads | None, needs: Requirements, quantizer: Choice
) -> StepReads | None:
    """`reads` where a quantizer stores a tied head apart: the embedding is then only looked up."""
    if reads is None or needs.head is None or not needs.tied_head:
        return reads
    ask, options = quantizer.registered.size, quantizer.options
    without = ask("weight_bytes", replace(needs, head=None), options)
    if ask("weight_bytes", needs, options) == without:
        return reads
    row = needs.head[1] * BYTES[needs.dtype]
    return replace(reads, tables=(*reads.tables, Table(needs.head[0] * row, row)))


def _check_each(**named: Sequence[int]) -> None:
    for name, sizes in named.items():
        for one in sizes:
            check_sizes(**{name: one})


def _planned(
    model: Any, revision: str | None, selections: Mapping[str, Any], device_memory: int | None
) -> tuple[PreTrainedConfig, Plan]:
    """The plan for the config of `model`, all of which an estimate can count."""
    from jackfield.api import planned
    from jackfield.bridge.devices import ElsewhereError
    from jackfield.bridge.source import find

    source = find(model, revision)
    own = {}
    if source.live is not None and selections.get("dtype", AUTO) == AUTO:
        own["dtype"] = str(source.live.dtype).removeprefix("torch.")
    try:
        found = planned(source.config, {**selections, **own}, device_memory)
    except ElsewhereError as error:
        raise UsageError(
            f"{error}; to plan for one that is elsewhere give --device-memory 80GB, in Python "
            "device_memory='80GB'"
        ) from None
    _check_counted(found)
    return source.config, found


def _free(needs: Requirements) -> int:
    free = free_bytes(needs.device)
    if free is None:
        raise UsageError(
            f"nobody tells how much memory is free on {needs.device}; say it with device_memory="
        )
    return free


def _checkpoint_bytes(config: PreTrainedConfig, needs: Requirements) -> int:
    if needs.stored is not None:
        return needs.weight_bytes
    return plain_bytes(replace(needs, dtype=_stored_dtype(config, needs)))


def _check_counted(planned: Plan) -> None:
    """Refuse what an estimate would leave out."""
    where = planned.placement
    for stray, what, instead in (
        (planned.assistant, "a draft model", _without(planned.assistant)),
        (planned.heads, "a model's own heads", "ask without the decoding"),
        (where is not None and where.spread, "weights in several places", "name one device"),
    ):
        if stray:
            raise UsageError(f"an estimate does not count {what}; {instead}")


def _without(draft: Plan | None) -> str:
    """What to do where a draft model is not counted."""
    if draft is None or draft.early_exit is None:
        return "ask about each of the two models"
    return "ask without the decoding: the model's own first layers have no weights of their own"


def _stored_dtype(config: PreTrainedConfig, needs: Requirements) -> str:
    name = str(config.dtype).removeprefix("torch.")
    return name if name in DTYPES else needs.dtype


def _lengths(asked: Sequence[int] | None, context: int | None) -> tuple[int, ...]:
    far = context or FAR
    if asked is None:
        return (*(n for n in _LENGTHS if n < far), far)
    if context is not None and (beyond := [n for n in asked if n > context]):
        raise UsageError(
            f"lengths: {beyond[0]} tokens are more than the model's context of {context}; ask for "
            f"at most {context}"
        )
    return tuple(sorted(set(asked)))


def _probe(dry: DryRun, lengths: Sequence[int], limit: int | None) -> tuple[StepBytes, ...]:
    """The steps of each length, of one token, and of as many as a step feeds at most."""
    most = lengths[-1] if limit is None else min(limit, lengths[-1])
    steps = []
    for tokens in sorted({1, most, *lengths}):
        fed = min(tokens, limit or tokens)
        prefill, decode = dry.activations(fed, tokens), dry.activations(1, tokens)
        if prefill is None or decode is None:
            return ()
        steps.append(StepBytes(tokens, fed, prefill, decode))
    return tuple(steps)
