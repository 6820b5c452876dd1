"""The tables of `jackfield bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield.cli.output import console, note, table
from jackfield.units import in_milliseconds, in_units

if TYPE_CHECKING:
    from rich.text import Text

    from jackfield.benchmarking.results import Benchmark
    from jackfield.benchmarking.saved import Comparison
    from jackfield.benchmarking.verdicts import Change

#: How a verdict is coloured.
COLORS = {"faster": "green", "slower": "red", "unchanged": "default", "undecided": "yellow"}


def print_table(found: Benchmark) -> None:
    """Speeds, times and shares by row; a row that is invalid has reasons in their place."""
    out, work = console(), found.workload
    out.print(
        f"{work['name']}: {work['requests']} requests, {work['prompt_tokens']} prompt tokens and "
        f"{work['new_tokens']} new ones a round, {work['batch']} at a time"
    )
    out.print(_speeds(found))
    roof = found.roof or "what the device can read and multiply"
    out.print(f"\nmedians over rounds; shares are of {roof}")
    out.print(_times(found))
    for row in found.rows:
        for reason in row.reasons:
            out.print(_styled(f"{row.label}: invalid: {reason}", "red"), soft_wrap=True)
    _hint(found)


def _speeds(found: Benchmark) -> Any:
    rows = table("row")
    for heading in ("tokens/s", "round", "middle half", "time", "from, to"):
        rows.add_column(heading, justify="right")
    rows.add_column("")
    new = found.workload["new_tokens"]
    for row in found.rows:
        if not row.valid:
            rows.add_row(row.label, "", "", "", "", "", _styled("invalid", "bold red"))
            continue
        low, high = row.spread
        rows.add_row(
            row.label,
            f"{new / row.seconds:.4g}",
            in_milliseconds(row.seconds),
            f"{1000 * low:.0f} to {1000 * high:.0f}",
            *_change(found.change(row), is_base=row.label == found.base),
        )
    return rows


def _change(change: Change | None, *, is_base: bool) -> tuple[Any, ...]:
    if change is None:
        return ("1", "", "") if is_base else ("", "", "")
    verdict = _styled(str(change.verdict), COLORS[change.verdict])
    return f"{change.ratio:.3f}", interval(change), verdict


def interval(change: Change) -> str:
    """From where to where a ratio may be."""
    if not change.low:
        return "any"
    return f"{change.low:.3f}, {change.high:.3f}"


def _times(found: Benchmark) -> Any:
    rows = table("row")
    for heading in ("first token", "per token", "peak", "weights", "bandwidth", "compute"):
        rows.add_column(heading, justify="right")
    for row in found.rows:
        if not row.valid:
            rows.add_row(row.label, _styled("invalid", "bold red"))
            continue
        memory, compute = row.shares or (None, None)
        rows.add_row(
            row.label,
            in_milliseconds(row.middle("first")),
            in_milliseconds(row.middle("per_token")),
            *(
                "-" if size is None else in_units(size)
                for size in (row.peak_bytes, row.weight_bytes)
            ),
            *("-" if share is None else f"{share:.1%}" for share in (memory, compute)),
        )
    return rows


def _styled(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style)


def _hint(found: Benchmark) -> None:
    needed = [
        change.needed
        for row in found.rows
        if (change := found.change(row)) is not None and change.needed
    ]
    if needed:
        note(f"undecided: about --rounds {max(needed)} would tell, as noisy as it is now")


def print_comparison(found: Comparison) -> None:
    """What became of each row of a saved run."""
    out = console()
    whose = f", in units of {found.yardstick}" if found.yardstick else ""
    out.print(f"\nbeside the saved run{whose}")
    rows = table("row")
    for heading in ("time", "from, to"):
        rows.add_column(heading, justify="right")
    rows.add_column("")
    for row in found.rows:
        if row.change is None:
            rows.add_row(row.label, "", "", _styled(row.why or "", "red" if row.failed else "dim"))
        else:
            rows.add_row(row.label, *_change(row.change, is_base=False))
    out.print(rows)
    for text in found.notes:
        note(text)
    if found.yardstick is None:
        note("no other program is in both runs, so a slower machine counts as slower; add --rival")
