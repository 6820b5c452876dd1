"""The page of the sweep over all causal types: counts first, then each type that has a note."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

INTRO = """\
# Every causal type

Written by `python tests/conformance/sweep.py` on a CPU: each type of transformers' own list of
causal models, tiny and with random weights, by one recipe (`tests/conformance/zoo.py`), with
every cache and every attention of a CPU and with `auto`. Windows are 5 tokens and sparse
attention 4; the batch is ragged, with prompts of 1, 3, 7 and 12 tokens, and 8 new ones are told.
Prompts are read whole, with `eager` and `auto` also in chunks of 7, with `auto` also of 1 and
each by itself. *Equal*: the tokens of plain `generate` with eager attention, one prompt at a
time, in float64, or in float32 where a model's own code takes no float64. *Refused*: by name,
with a reason, before weights load. A third outcome would be counted as WRONG.
"""


def page(rows: Sequence[Row], types: Sequence[str]) -> str:
    """`types` are all that there are; those without a row are named as such."""
    missing = [name for name in types if name not in {row["type"] for row in rows}]
    tried = [row for row in rows if "unbuilt" not in row]
    unbuilt = {row["type"]: row["unbuilt"] for row in rows if "unbuilt" in row}
    parts = [
        INTRO,
        _summary(rows, tried),
        f"{_grid(tried)}\n",
        "## Types by what became of them\n",
        f"{_by_outcome(tried)}\n",
        f"{_oracle(tried)}\n",
        "## Not built by the recipe\n",
        "Most are a text model beside another one, which is in the list under a type of its own.\n",
        "\n".join(f"- `{name}`: {why}" for name, why in unbuilt.items()),
        "",
    ]
    if missing:
        parts += ["## Not run\n", f"{', '.join(f'`{name}`' for name in missing)}\n"]
    return "\n".join(parts)


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]


def _summary(rows: Sequence[Row], tried: Sequence[Row]) -> str:
    counts = Counter(_kind(o) for row in tried for o in row["cells"].values())
    runs = sum("equal" in row["cells"].values() for row in tried)
    return (
        f"Of {len(rows)} types, {len(tried)} were built and {runs} of these run; the others are "
        f"refused by name. Of {sum(counts.values())} cells, {counts['equal']} are equal, "
        f"{counts['refused']} are refused and {counts['WRONG']} are WRONG.\n"
    )


def _grid(tried: Sequence[Row]) -> str:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in tried:
        for name, outcome in row["cells"].items():
            counts[name][_kind(outcome)] += 1
    lines = ["| cache, attention | equal | refused | WRONG |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {c['equal']} | {c['refused']} | {c['WRONG']} |" for name, c in counts.items()
    ]
    return "\n".join(lines)


def _by_outcome(tried: Sequence[Row]) -> str:
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for row in tried:
        groups[sum(o == "equal" for o in row["cells"].values())].append(row["type"])
    lines = ["| equal cells | types |", "|---|---|"]
    lines += [
        f"| {count} | {', '.join(f'`{name}`' for name in groups[count])} |"
        for count in sorted(groups, reverse=True)
    ]
    return "\n".join(lines)


def _oracle(tried: Sequence[Row]) -> str:
    running = [row for row in tried if "equal" in row["cells"].values()]
    apart = [row["type"] for row in running if not row["uncached"]]
    same = len(running) - len(apart)
    said = (
        f"The oracle itself was checked: of {len(running)} types that run, {same} say the same "
        "in plain transformers without any cache, where all is read again for each token."
    )
    if not apart:
        return said
    names = ", ".join(f"`{name}`" for name in apart)
    return (
        f"{said} Not so {names}: what they keep of their columns depends on how many there are in "
        "one step, so transformers' own cache changes their text."
    )
