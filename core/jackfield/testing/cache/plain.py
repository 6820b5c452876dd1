"""The cache in plain transformers code, steps that are compiled, and steps at fixed places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jackfield.contracts import PackedLayer
from jackfield.errors import UsageError
from jackfield.in_transformers.cache import cache
from jackfield.planning.solving import reasons_against
from jackfield.testing.cache.bench import Bench
from jackfield.testing.cache.driver import Driver
from jackfield.testing.cache.reading import strided
from jackfield.testing.cache.runs import engine_of, prompts, right_for
from jackfield.testing.checks import NotTriedError, WrongError

NEW = 8
_COMPILED: dict[str, Any] = {"compile": "inductor?backend=eager"}


def generated(bench: Bench, name: str, lengths: tuple[int, ...]) -> str:
    """`generate(past_key_values=…)` of rows padded at the left."""
    bench.plan(name)
    model: Any = bench.model(name)
    selection = _sized(bench, "max_cache_len", max(lengths) + NEW)
    try:
        past = cache(selection, model)
    except UsageError as error:
        raise NotTriedError(str(error)) from None
    texts = prompts(lengths)
    longest = max(lengths)
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=model.device)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths], device=ids.device)
    output: Any = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=past,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    worst = 0.0
    reference = right_for(bench, name, bench.dtype)
    for row, text in enumerate(texts):
        whole = (*text, *output.sequences[row, longest:].tolist())
        right, bound = reference.logits(whole), reference.bound(whole)
        for at, logits in enumerate(output.logits):
            off = float((logits[row].double().cpu() - right[len(text) + at - 1]).abs().max())
            if not off <= bound:
                raise WrongError(
                    f"generate: the logits of row {row} behind {len(text) + at} tokens are off by "
                    f"{off:.3g}, at most {bound:.3g} is rounding"
                )
            worst = max(worst, off)
    return f"{len(texts) * NEW} logits, at most {worst:.2g} off"


def _sized(bench: Bench, option: str, size: int) -> str:
    """The selection, with a size where it takes that as an option and none is chosen."""
    if getattr(bench.subject.options, option, None) is not None:
        return bench.subject.selection
    return bench.sized(option, size) or bench.subject.selection


def compiled(bench: Bench, name: str) -> str:
    """Steps that are traced, with keys and values handed over from outside of the model's code."""
    found = bench.planned(name, None, **_COMPILED)
    if isinstance(found, Exception) and "inductor (" in str(found):
        raise NotTriedError(str(found))
    with engine_of(bench, name, what="compiles", **_COMPILED) as (engine, computed):
        engine.generate(prompts((6, 3)), settings=[{"max_new_tokens": n} for n in (8, 5)])
    return computed.compare(right_for(bench, name, bench.dtype))


def recordable(bench: Bench, rows: int) -> str:
    """Decode steps at one place: same addresses, numbers of the step, keys in their pages."""
    selection = _sized(bench, "num_tokens", 640)
    planned = bench.plan(bench.sharp, cache_implementation=selection)
    own, options = planned["cache"].registered, planned["cache"].options
    # As steps that are compiled are planned, whichever compiler the device has.
    needs = replace(planned.requirements, compiled=True, traced=True)
    if reasons := own.ask("unrecordable", needs, options):
        raise NotTriedError("; ".join(reasons))
    if reasons := reasons_against(own, needs, options):
        raise WrongError(f"declares recordable, and refuses steps that are: {'; '.join(reasons)}")
    made = replace(planned, requirements=needs)
    cache = bench.bind(made, bench.model(bench.sharp))
    with torch.inference_mode():
        try:
            return _recorded(Driver(cache, made.requirements, bench.rounding(cache)), rows)
        finally:
            cache.close()


def _recorded(driver: Driver, rows: int) -> str:
    cache: Any = driver.cache
    place = cache.fix(rows)
    before = _addresses(place)
    _padding(driver, place)
    cache.forget()
    for length in range(4, 4 + rows):
        driver.admit(length)
    driver.step()
    steps = 0
    for number in range(12):
        driver.step()
        if driver.inputs.fixed is None:
            raise WrongError(
                f"prepare lays {len(driver.running)} sequences anywhere, and fix({rows}) has room"
            )
        if driver.inputs.fixed is not place or _addresses(place) != before:
            raise WrongError("a step at a fixed place lies at other addresses than before")
        _numbers(driver, place)
        steps += 1
        if number == 6 and rows > 1:
            driver.release(driver.running[0])
    driver.release_all()
    cache.loosen(rows)
    driver.admit(5)
    driver.step()
    driver.step()
    if driver.inputs.fixed is not None:
        raise WrongError("a step lies at a fixed place after loosen")
    return f"{steps} steps at one place"


def _padding(driver: Driver, place: Any) -> None:
    """What `fix` returns has a step of padding in it: writing it harms nobody."""
    for layer in range(len(driver.windows)):
        shapes = driver.judge.states.shapes[layer]
        junk = [strided(driver.judge.states.full((place.rows, *s), 777.0), 1) for s in shapes]
        found = driver.cache.write(layer, *junk)  # type: ignore[attr-defined]
        if not isinstance(found, PackedLayer):
            raise WrongError("write returns no PackedLayer for the step that fix laid out")


def _addresses(place: Any) -> list[int]:
    tensors = [place.input_ids, place.position_ids]
    for tables in place.tables:
        tensors += [tables.block_table, tables.first, tables.step.seq_lens]
        tensors.append(tables.step.cu_seqlens_q)
    return [tensor.data_ptr() for tensor in tensors]


def _numbers(driver: Driver, place: Any) -> None:
    """The step that was just committed, as whoever reads its addresses finds it."""
    ends = [sequence.num_cached for sequence in driver.running]
    ids = [s.tokens[s.num_cached - 1] for s in driver.running]
    count, pad = len(ids), place.rows - len(ids)
    due = {
        "input_ids": (place.input_ids[0].tolist(), ids + [0] * pad),
        "position_ids": (place.position_ids[0].tolist(), [end - 1 for end in ends] + [0] * pad),
    }
    for tables in place.tables:
        due["seq_lens"] = (tables.step.seq_lens[:count].tolist(), ends)
        due["cu_seqlens_q"] = (tables.step.cu_seqlens_q.tolist(), list(range(place.rows + 1)))
    for name, (found, right) in due.items():
        if found != right:
            raise WrongError(f"{name} at the fixed place are {found}, and {right} are due")
