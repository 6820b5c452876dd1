"""What tuning found as a profile: every selection by name, how it was made, and its evidence."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jackfield.api import prepare
from jackfield.benchmarking.verdicts import Verdict
from jackfield.planning.profile_files import FORMAT, SELECTABLE, free_text
from jackfield.planning.profile_options import as_told
from jackfield.planning.profiles import NAMED, surroundings
from jackfield.planning.solving import ARGUMENTS
from jackfield.registry.discovery import registry
from jackfield.spelling import AUTO

if TYPE_CHECKING:
    from jackfield.benchmarking.verdicts import Change
    from jackfield.benchmarking.workload import Workload
    from jackfield.planning.planning import Plan
    from jackfield.registry.backends import Choice
    from jackfield.tuning.outcome import Outcome, Tried

HEAD = "Written by `jackfield tune`; take it with --profile, or jackfield.load(…, profile=…)."
#: The kinds that rungs decide; others are in a profile where the caller named them.
TUNED = ("attention", "cache", "compiler", "quantizer")


def profile_of(model: str, outcome: Outcome, workload: Workload, budget: float) -> dict[str, Any]:
    """The content of a profile file."""
    found, change = prepare(model, **outcome.arguments), outcome.change
    selections = pinned(found.plan, outcome.arguments)
    beside = named(outcome.arguments, selections)
    made = {
        "model": model,
        **surroundings(found.plan, found.job.source.config),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "finished": outcome.finished,
        "unreached": list(outcome.unreached),
        "budget_seconds": budget,
        "workload": workload.to_dict(),
        "beside_auto": None if change is None else beside_auto(change),
        "named": beside,
    }
    evidence = [row(one, workload) for one in outcome.tried]
    selections = {name: v for name, v in selections.items() if name not in beside}
    return {"format": FORMAT, "selections": selections, "made": made, "evidence": evidence}


def pinned(plan: Plan, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan chose, as arguments of `jackfield.load` that leave nothing of it open."""
    found = {ARGUMENTS[kind]: _text(plan[kind]) for kind in TUNED}
    found["dtype"] = plan.requirements.dtype
    spread = plan.placement is not None and plan.placement.spread
    if not spread and arguments.get("max_memory") is None:  # whose places one device has not
        found["device_map"] = plan.device or "cpu"
    sizes = {"max_batch_size": plan.limits.rows}
    named = {n: v for n, v in arguments.items() if n in SELECTABLE and v not in (None, AUTO)}
    return {**sizes, **named, **found}


def named(arguments: Mapping[str, Any], selections: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile cannot select, and only says: models, files, and selections that need one."""
    found = {name: arguments.get(name) for name in NAMED}
    for name, value in selections.items():
        needs_one = name == "decoding" and arguments.get("assistant_model") is not None
        if needs_one or free_text(name, value) is not None:
            found[name] = value
    return {name: told for name, v in found.items() if (told := as_told(v)) is not None}


def beside_auto(change: Change) -> dict[str, Any]:
    """The last race as plain values; an interval that there is none of is None."""
    known = change.low > 0
    faster = change.verdict is Verdict.FASTER
    return {
        "ratio": change.ratio,
        "low": change.low if known else None,
        "high": change.high if known else None,
        "rounds": change.rounds,
        "verdict": "faster for certain" if faster else "not faster for certain",
    }


def _text(choice: Choice) -> str:
    """The shortest selection that means this backend with these options."""
    address, query = registry().address(choice.registered), choice.query
    return f"{address}?{query}" if query else address


def row(tried: Tried, workload: Workload) -> dict[str, Any]:
    """What was tried as plain values; what is unknown is None."""
    change, quality = tried.change, tried.quality
    low, high = _middle_half(tried.times)
    return {
        "rung": tried.rung,
        "label": tried.label,
        "verdict": tried.verdict,
        "rounds": len(tried.times),
        "seconds": tried.seconds,
        "seconds_middle_half": None if low is None else [low, high],
        "tokens_per_second": _rate(tried, workload),
        "ratio": change.ratio if change else None,
        "ratio_low": change.low if change and change.low > 0 else None,
        "ratio_high": change.high if change and change.low > 0 else None,
        "peak_bytes": tried.peak_bytes,
        "perplexity": quality.perplexity if quality else None,
        "right_answers": quality.right if quality and quality.total else None,
        "answers": quality.total if quality and quality.total else None,
        "selections": {n: v for n, v in tried.arguments.items() if v not in (None, AUTO)},
    }


def _rate(tried: Tried, workload: Workload) -> float | None:
    """New tokens a second; None of requests that come one by one, whose latency counts."""
    if tried.seconds is None or workload.waits:
        return None
    return workload.new_tokens / tried.seconds


def _middle_half(times: Any) -> tuple[float | None, float | None]:
    if not times:
        return None, None
    ranked = sorted(times)
    quarter = len(ranked) // 4
    return ranked[quarter], ranked[-1 - quarter]
