"""Which rows are results: as many tokens as asked for, the model's, of the backends asked for."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jackfield.benchmarking import observed, parity
from jackfield.benchmarking.contenders import OURS, asked_for
from jackfield.benchmarking.nursery import Nursery
from jackfield.benchmarking.operators import alike
from jackfield.benchmarking.results import Row
from jackfield.benchmarking.worker import LOADING, Worker
from jackfield.benchmarking.workload import Workload
from jackfield.errors import JackfieldError, PluginError
from jackfield.requests.arguments import OF_A_PLAN

Texts = Sequence[Mapping[tuple[int, ...], int]]
"""Of each request, every text that it got, and how often."""

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and a text that it got."""

#: What says which model it is, among the arguments of `jackfield.load`.
OF_THE_MODEL = ("model", "revision", "device_map", "adapter", "merge_adapter", "max_memory")

UNJUDGED = "its tokens could not be judged"
#: How many different texts of a request are judged; in one dtype there are few.
MOST = 3


def judged(
    rows: Sequence[Row],
    texts: Sequence[Texts],
    workload: Workload,
    nursery: Nursery | None = None,
    seconds: Callable[[], float] = lambda: LOADING,
) -> list[Row]:
    """The rows with the reasons against them, by processes that may be forked in a nursery.

    Whatever one is asked may take as many `seconds` as there are then.
    """
    nurseries = () if nursery is None else (nursery,)
    found = [_observed(_shape(row, own, workload)) for row, own in zip(rows, texts, strict=True)]
    same = alike(found)
    found = [
        replace(row, reasons=(same[row.label],)) if row.label in same else row for row in found
    ]
    pairs = [list(_pairs(own, workload)) for own in texts]
    groups: dict[str, dict[Pair, None]] = {}
    for row, own in zip(found, pairs, strict=True):
        if row.valid:
            groups.setdefault(_reference(row), {}).update(dict.fromkeys(own))
    try:
        with Worker(*nurseries) as reference:
            known = {
                key: dict(zip(own, _ask(reference, key, own, seconds), strict=True))
                for key, own in groups.items()
            }
    except JackfieldError as error:
        why = (f"{UNJUDGED}: {error}",)
        return [replace(row, reasons=why) if row.valid else row for row in found]
    rounding = functools.partial(_lossy, workload=workload, nurseries=nurseries, seconds=seconds)
    return [
        _with_parity(row, [known[_reference(row)][pair] for pair in own], rounding)
        if row.valid
        else row
        for row, own in zip(found, pairs, strict=True)
    ]


def _shape(row: Row, texts: Texts, workload: Workload) -> Row:
    """Every text must be as long as was asked for."""
    if not row.valid:
        return row
    for number, (one, seen) in enumerate(zip(workload.requests, texts, strict=True), 1):
        for text in seen:
            if len(text) != one.new_tokens:
                why = f"request {number} got {len(text)} tokens and asked for {one.new_tokens}"
                return replace(row, reasons=(why,))
    return row


def _observed(row: Row) -> Row:
    """What was asked for must have run."""
    if not row.valid or row.report is None:
        return row
    asked = asked_for(row.arguments)
    return replace(row, reasons=tuple(observed.reasons_against(asked, row.report)))


def _pairs(texts: Texts, workload: Workload) -> Iterator[Pair]:
    """The last of a request's texts come before the first, for what goes wrong late."""
    for one, seen in zip(workload.requests, texts, strict=True):
        for text in itertools.islice(reversed(list(seen)), MOST):
            yield one.prompt, text


def _reference(row: Row) -> str:
    """Which model it is, and in which dtype."""
    model = {name: v for name in OF_THE_MODEL if (v := row.arguments.get(name)) is not None}
    dtype = (row.plan or {}).get("dtype", "float32")
    return json.dumps({"model": model, "dtype": dtype}, sort_keys=True, default=str)


def _ask(
    reference: Worker, key: str, pairs: Mapping[Pair, None], seconds: Callable[[], float]
) -> list[dict[str, float]]:
    found: list[dict[str, float]] = reference.ask(
        "judge", seconds(), texts=list(pairs), **json.loads(key)
    )
    return found


def _with_parity(
    row: Row, found: Sequence[Mapping[str, float]], rounding: Callable[[Row], bool]
) -> Row:
    lossy = False
    try:
        if parity.reason_against(found, lossy=False):
            lossy = rounding(row)
    except PluginError as error:  # what `verify` says names the backend, and the layer
        return replace(row, reasons=(f"wrong tokens: {error}",))
    except JackfieldError as error:
        return replace(row, reasons=(f"{UNJUDGED}: {error}",))
    why = parity.reason_against(found, lossy=lossy)
    told = {
        "worst": max(one["worst"] for one in found),
        "mean": sum(one["mean"] for one in found) / len(found),
        "allowed": max(map(parity.allowed, found)),
        "texts": len(found),
        "lossy": lossy,
    }
    return replace(row, parity=told, reasons=(why,) if why else ())


def _lossy(
    row: Row, workload: Workload, nurseries: Sequence[Nursery], seconds: Callable[[], float]
) -> bool:
    """Whether the row rounds on purpose: a rival as it says, a quantizer by what it declares, a
    cache by what `verify` finds in it. Raises what `verify` raises.
    """
    if row.program != OURS:
        return bool((row.plan or {}).get("rounds"))
    from jackfield.api import plan

    arguments = dict(row.arguments)
    model = arguments.pop("model")
    of_a_plan = {name: value for name, value in arguments.items() if name in OF_A_PLAN}
    choice = plan(model, **of_a_plan)["quantizer"]
    if choice.backend.relative_error(choice.options) != 0:
        return True
    requests = [(one.prompt, one.new_tokens, 0.0) for one in workload.requests[:2]]
    with Worker(*nurseries) as again:
        asked = {**row.arguments, "verify": True}
        again.ask("load", seconds(), program=OURS, arguments=asked, requests=requests)
        again.ask("settled", seconds())
        again.ask("round", seconds(), number=0)
        report: Mapping[str, Any] = again.ask("finish", seconds())["report"]
    return bool((report.get("verified") or {}).get("rounded"))
