"""The page of the composition tables: counts, then every refusal of the run by its reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cells import ALL, LOSSY, SLOW, Cell

#: The note of an equal cell -> how the page marks it.
MARKS = {"float64": "equal", "float32": "\\* equal", "same": "equal", "rounded": "† equal"}


@dataclass(frozen=True, eq=False)
class Table:
    """What the page says about one kind of cells: `intro` above the table, `beside` under it."""

    title: str
    corner: str
    intro: str
    beside: Mapping[str, str]


INTRO = f"""\
# What goes with what

Written by `python tests/conformance/composition.py` on a CPU: {len(ALL)} tiny models of real
architectures, random weights, and every backend that is installed, in four tables. *Equal*: the
same tokens as the oracle in every mode that is named above the table, in float64, or in float32
(\\*) where something takes no float64. *Refused*: by name, with a reason, before weights load.
A third outcome would be counted as WRONG. [Why refused](#why-refused) has every reason of the run.
"""

ATTENTION = Table(
    "Attention and cache",
    "attention",
    """\
The oracle is `transformers.generate` with eager attention, one sequence at a time. Modes: single
prompts, a ragged left-padded batch with lengths from window − 2 to 3 × window, and prefill in
chunks of 1, 7 and all tokens. Models with linear-attention layers and prefix models read a prompt
in one piece; chunks are refused there.""",
    {
        "quantized": LOSSY["quantized"],
        "triton": SLOW["triton"],
    },
)
DECODING = Table(
    "Decoding and cache",
    "decoding",
    """\
The oracle is `transformers.generate`, greedy or with three beams, one prompt at a time, without
drafts. Modes: four prompts one by one and in one batch, read whole and in chunks of 7, each with
EOS tokens that texts come to, and with none at all: neither of the request nor of the model nor of
the tokenizer. A draft model is the model itself with its weights shaken, so that many a draft is
right and many a one is wrong; *another tokenizer* gives the same characters other ids. *Structured*
texts follow a regular expression, for the oracle by llguidance's own mask through
`prefix_allowed_tokens_fn`. The attention is the one that `auto` takes. `mtp` is not in the table:
these models have no heads ([which it was tried with](decoding.md#heads-of-its-own):
tests/conformance/test_mtp.py).""",
    {"quantized` with `sample": LOSSY["quantized"]},
)
COMPILING = Table(
    "Compiler and cache",
    "compiler",
    """\
The oracle is that of the first table. Modes: single prompts, a ragged batch, and a ragged batch
with drafts of `prompt_lookup` where the cache can take them back. `inductor` runs with
`backend=eager`: tracing, guards and sizes are the same, and no C++ is compiled.""",
    {"quantized": LOSSY["quantized"]},
)
QUANTIZING = Table(
    "Quantizer and cache",
    "quantizer",
    """\
Quantized models say something else than whole ones, so the oracle is the quantized model itself
with cache `dynamic`, attention `sdpa` (or `eager`), without drafts, one prompt at a time. Modes:
single prompts, a ragged batch, and a ragged batch with drafts where the cache can take them back.
A step of another shape has other last bits, and two tokens that are all but equally likely may
change places. How far that moves scores is measured by the oracle alone, which reads each text
again in one piece (prefix models: writes it again with attention `eager`): texts may part only
where it preferred its own token by less than twice that.
It is nothing to speak of (less than 0.001) where activations are float32, and more (†) where they
are rounded to bfloat16 or to 8 bits. Models with experts ask all of them here: which of two equally
good ones is asked would be decided by last bits, and what it says is something else altogether.""",
    {
        "gptq": SLOW["gptq"],
        "quantized": LOSSY["quantized"],
    },
)


def page(tables: Mapping[Table, Sequence[Cell]]) -> str:
    parts = [INTRO]
    for table, found in tables.items():
        parts += [f"## {table.title}\n", f"{table.intro}\n", f"{_grid(table, found)}\n"]
        parts += [f"Not in the table: `{name}` ({why}).\n" for name, why in table.beside.items()]
    parts += ["## Families\n", f"{_families(tables)}\n", "## Why refused\n"]
    for table, found in tables.items():
        parts += [f"### {table.title}: refused\n", f"{_refusals(found)}\n"]
    return "\n".join(parts)


def _grid(table: Table, found: Sequence[Cell]) -> str:
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for cell in found:
        equal = cell.outcome == "equal"
        counts[cell.row, cell.cache][MARKS[cell.note] if equal else cell.outcome] += 1
    caches = sorted({cell.cache for cell in found})
    lines = [
        f"| {table.corner} | " + " | ".join(f"`{c}`" for c in caches) + " |",
        "|---" * (len(caches) + 1) + "|",
    ]
    for row in dict.fromkeys(cell.row for cell in found):
        texts = [_counts(counts[row, cache]) for cache in caches]
        lines.append(f"| {_name(row)} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _name(row: str) -> str:
    """The backend in code, and what is asked of it beside."""
    backend, comma, more = row.partition(", ")
    return f"`{backend}`{comma}{more}"


def _counts(counts: Counter[str]) -> str:
    order = [*dict.fromkeys(MARKS.values()), "refused", "wrong"]
    parts = [
        f"{counts[kind]}{'' if kind.startswith(('†', chr(92))) else ' '}{kind}"
        for kind in order
        if counts[kind]
    ]
    return ", ".join(parts).replace("wrong", "WRONG") or "–"


def _families(tables: Mapping[Table, Sequence[Cell]]) -> str:
    """How many cells of each family are equal, of how many."""
    lines = [
        "Equal cells of each, of all that are in the table.\n",
        "| family | " + " | ".join(table.title.lower() for table in tables) + " |",
        "|---" * (len(tables) + 1) + "|",
    ]
    for family in ALL:
        own = [[c.outcome == "equal" for c in cs if c.family == family] for cs in tables.values()]
        lines.append(f"| `{family}` | " + " | ".join(f"{sum(o)} of {len(o)}" for o in own) + " |")
    return "\n".join(lines)


def _refusals(found: Sequence[Cell]) -> str:
    """One line per reason, with what it stands against."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for cell in found:
        if cell.outcome == "refused":
            reason = cell.note.split(": ", 1)[-1].rsplit("; ", 1)[0]
            reasons[reason].append(cell.family)
    return "\n".join(f"- {reason}: {_named(reasons[reason])}" for reason in sorted(reasons))


def _named(families: Sequence[str]) -> str:
    """The families, the shorter way round."""
    refused = list(dict.fromkeys(families))
    others = [family for family in ALL if family not in refused]
    if not others:
        return "all"
    if len(others) < len(refused) / 2:
        return f"all but {', '.join(f'`{f}`' for f in others)}"
    return ", ".join(f"`{f}`" for f in refused)
