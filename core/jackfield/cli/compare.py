"""`jackfield eval` with two selections: what was lost, beside what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import typer

from jackfield.cli.options import Backends
from jackfield.cli.output import console, print_json, table
from jackfield.errors import UsageError
from jackfield.units import in_units

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine
    from jackfield.estimates.comparing import Comparison
    from jackfield.estimates.perplexity import Perplexity


class ComparisonLimits(Protocol):
    """What the flags say about a comparison; None: what is usual."""

    @property
    def tasks(self) -> bool | None: ...
    @property
    def max_drop(self) -> float | None: ...
    @property
    def max_rise(self) -> float | None: ...


def baseline(given: Sequence[str] | None, model: str, backends: Backends) -> dict[str, Any] | None:
    """The arguments of `jackfield.load` to compare with; None: nothing is compared.

    Those of the command line with each KIND=NAME of `given` in place of its own; adapter=none is
    the model without the adapter, which otherwise both have. Without any, a quantizer is compared
    with none. Raises UsageError.
    """
    from jackfield.planning.solving import ARGUMENTS

    names = {**ARGUMENTS, "quantization": ARGUMENTS["quantizer"], "model": "model"}
    names |= {"dtype": "dtype", "device": "device_map", "revision": "revision"}
    names |= {"adapter": "adapter"}
    before = backends.arguments() | {"model": model}
    if not given:
        if before["quantization"] in ("auto", "none", "plugin:none"):
            return None
        given = ["quantization=none"]
    for text in given:
        kind, mark, name = text.partition("=")
        if kind not in names or not mark or not name:
            raise UsageError(
                f"cannot read --baseline {text!r}: write KIND=NAME, with one of "
                f"{', '.join(sorted(names))}"
            )
        if kind == "adapter" and name == "none":
            before |= {"adapter": None, "merge_adapter": False}
        else:
            before[names[kind]] = name
    return before


def compare(
    model: str,
    backends: Backends,
    before: dict[str, Any],
    asked: ComparisonLimits,
    text: str | None,
    count: int,
    seed: int,
    json: bool,
) -> None:
    """Compare, show it, and end with exit code 1 where a limit is passed."""
    from jackfield.estimates import comparing

    after = backends.arguments() | {"model": model}
    given = {name: getattr(asked, name) for name in ("max_drop", "max_rise")}
    limits = {name: value for name, value in given.items() if value is not None}
    found = comparing.compare(
        model, after, before, text=text, tasks=asked.tasks, count=count, seed=seed, **limits
    )
    if json:
        print_json(found.to_dict())
    else:
        _print(found)
    for failure in found.failures:
        console(stderr=True).print(f"error: {failure}", style="bold red", soft_wrap=True)
    if found.failures:
        raise typer.Exit(1)


def perplexity_of(engine: Engine, text: str) -> Perplexity:
    from jackfield.estimates.perplexity import perplexity

    return perplexity(engine, text)


def _print(found: Comparison) -> None:
    before, after = found.before, found.after
    rows = table("")
    for heading in ("before", "after", "change"):
        rows.add_column(heading, justify="right")
    if before.tasks is not None and after.tasks is not None:
        for score, other in zip(before.tasks.scores, after.tasks.scores, strict=True):
            rows.add_row(score.task, *_change(score.accuracy, other.accuracy))
        rows.add_row("all tasks", *_change(before.tasks.accuracy, after.tasks.accuracy))
    values = before.perplexity.value, after.perplexity.value
    rows.add_row("perplexity", *(f"{value:.4g}" for value in values), f"{found.rise:+.1%}")
    sizes = before.weight_bytes, after.weight_bytes
    rows.add_row("weights", *map(in_units, sizes), f"{sizes[1] / sizes[0] - 1:+.1%}")
    out = console()
    out.print(rows)
    for name, side in (("before", before), ("after", after)):
        chosen = " · ".join(f"{kind} {c.registered.name}" for kind, c in side.plan.choices.items())
        out.print(f"{name}: {side.plan.requirements.dtype} · {chosen}")


def _change(before: float, after: float) -> tuple[str, str, str]:
    return f"{before:.1%}", f"{after:.1%}", f"{after - before:+.1%}"
