"""Which operators of torch a round calls: an attention that only calls another one shows by that.

The engine counts that a backend is called, and cannot see what it then calls itself. Two rows that
differ by their attention alone, and call every operator of torch equally often, ran the same thing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from jackfield.benchmarking.results import Row

#: Whose backends are what others are compared with.
_DISTRIBUTION = "jackfield"

#: Operators that compute nothing; the engine's own checks of backends call some more of them.
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "flatten",
        "lift_fresh", "narrow", "permute", "reshape", "resolve_conj", "resolve_neg", "select",
        "slice", "split", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
    )
)  # fmt: skip


def called(run: Callable[[], Any]) -> dict[str, int] | None:
    """How often `run` calls each operator that computes, in all threads; None where torch does not
    tell.
    """
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    try:
        all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # torch 2.11 may know no such thing
        return None
    with torch.profiler.profile(activities=activities, experimental_config=all_threads) as seen:
        run()
    counts = {one.key: one.count for one in seen.key_averages()}
    return {name: n for name, n in counts.items() if "::" in name and name not in _VIEWS}


def alike(rows: Sequence[Row]) -> dict[str, str]:
    """Label -> reason, of each row whose attention ran as that of another row does."""
    found: dict[str, str] = {}
    for one, other in itertools.combinations([row for row in rows if _told(row)], 2):
        if one.operators != other.operators or _but_attention(one) != _but_attention(other):
            continue
        names = [_attention(row) for row in (one, other)]
        if names[0] == names[1]:
            continue
        swap = names[1]["distribution"] == _DISTRIBUTION != names[0]["distribution"]
        copy, original = (one, other) if swap else (other, one)
        found[copy.label] = (
            f"attention {_attention(copy)['name']} called what {_attention(original)['name']} "
            f"does, operator by operator (row {original.label}): nothing of its own ran"
        )
    return found


def _told(row: Row) -> bool:
    return row.valid and bool(row.operators) and "chosen" in (row.plan or {})


def _attention(row: Row) -> Any:
    """Which it is, whoever chose it: a caller, a profile or the plan."""
    return {**(row.plan or {})["chosen"]["attention"], "how": ""}


def _but_attention(row: Row) -> str:
    """All of a plan that says what runs, but the attention."""
    plan = row.plan or {}
    chosen = {kind: {**one, "how": ""} for kind, one in plan["chosen"].items()}
    chosen["attention"] = {}
    return json.dumps([chosen, plan["dtype"], plan["device"], plan["kernels"]], default=str)
