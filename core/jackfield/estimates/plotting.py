"""Drawings, with matplotlib, which comes with `jackfield[plot]` and is imported when it draws."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.errors import UsageError, shown
from jackfield.paths import why_no_file
from jackfield.units import in_units

if TYPE_CHECKING:
    from jackfield.estimates.estimate import Estimate

_SUFFIXES = (".pdf", ".png", ".svg")
_POINTS = 48  # along the axis of tokens
_COLORS = ("#1f5fa8", "#c4541a", "#2d7d46", "#7a4fa3", "#8a6d1d", "#5a5f66")


def check_plot(file: Path) -> None:
    """Raise UsageError where `file` cannot become a drawing, before anything else is done."""
    if file.suffix.lower() not in _SUFFIXES:
        names = f"{', '.join(_SUFFIXES[:-1])} or .svg"
        raise UsageError(f"cannot draw {shown(file)}: name it {names}")
    if (why := why_no_file(file)) is not None:
        raise UsageError(f"cannot draw {shown(file)}: {why}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("drawing needs matplotlib: pip install 'jackfield[plot]'")


def plot_memory(found: Estimate, file: Path) -> None:
    """Memory of one request against its tokens, a line for each quantizer that tells its size.

    The device's memory is a line across; where a line of a quantizer meets it is the longest
    request. The weights alone are a dotted line. Raises UsageError.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    if found.cache_bytes(1) is None:
        name = found.plan["cache"].registered.name
        raise UsageError(f"cannot draw: the cache {name!r} does not say what a request takes")
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    tokens = _axis(found)
    for color, (label, weights) in zip(_COLORS, _lines(found), strict=False):
        beside = [_beside(found, n) for n in tokens]
        axes.plot(tokens, [weights + size for size in beside], color=color, label=label, lw=1.8)
        axes.axhline(weights, color=color, ls=":", lw=1)
        memory = found.memory(weights)
        if memory and tokens[0] < (longest := memory.longest) < found.context_length:
            axes.plot([longest], [weights + _beside(found, longest)], "o", color=color)
            axes.annotate(f"{longest:,}", (longest, found.device_memory), color=color,
                          xytext=(-4, 4), textcoords="offset points", ha="right")  # fmt: skip
    _draw_device(axes, found, tokens[0])
    _dress(axes, found)
    try:
        figure.savefig(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


def _draw_device(axes: Any, found: Estimate, left: int) -> None:
    """A line across; a note at the top where it is so far up that the others would lie flat."""
    size, top = found.device_memory, axes.get_ylim()[1]
    text = f"device: {in_units(size)} ({'given' if found.given else 'free here'})"
    if size > 3 * top:
        axes.annotate(f"{text}, far above", (0.02, 0.96), xycoords="axes fraction", va="top")
        return
    axes.axhline(size, color="black", lw=1.2)
    axes.annotate(text, (left, size), xytext=(4, 4), textcoords="offset points")


def _lines(found: Estimate) -> list[tuple[str, int]]:
    """(label, bytes of weights) for each way to store the weights, largest first, each size once.

    The plan's own, the other quantizers that say what they take, and the common dtypes.
    """
    chosen = found.plan["quantizer"].registered.name
    named = [(f"{chosen}, {found.plan.requirements.dtype} (chosen)", found.weight_bytes)]
    named += [
        (f"{w.registered.name}{' (not here)' if w.reasons else ''}", w.num_bytes)
        for w in found.weights
        if w.num_bytes is not None and not w.chosen
    ]
    named += [(name, found.dtypes[name]) for name in ("float32", "bfloat16")]
    sizes: dict[int, str] = {}
    for label, size in named:
        sizes.setdefault(size, label)
    lines = [(label, size) for size, label in sorted(sizes.items(), reverse=True)]
    return lines[: len(_COLORS)]


def _beside(found: Estimate, tokens: int) -> int:
    return (found.cache_bytes(tokens) or 0) + found.step_bytes(tokens)


def _axis(found: Estimate) -> list[int]:
    """Lengths from 256 tokens, or fewer where the context is short, each so much longer."""
    last = found.lengths[-1]
    first = min(256, max(1, last // 4))
    return sorted({round(first * (last / first) ** (i / (_POINTS - 1))) for i in range(_POINTS)})


def _dress(axes: Any, found: Estimate) -> None:
    from matplotlib.ticker import FuncFormatter

    needs, cache = found.plan.requirements, found.plan["cache"].registered.name
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(_ticks(axes.get_xlim()), minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{int(x):,}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: in_units(int(y)) if y else "0"))
    axes.set_xlabel("tokens of one request, prompt and new ones together")
    axes.set_title(
        f"{needs.architecture} on {needs.device}: weights (dotted), cache {cache}, peak of a step",
        loc="left",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="weights as", frameon=False)


def _ticks(limits: Sequence[float]) -> list[int]:
    return [2**i for i in range(31) if limits[0] <= 2**i <= limits[1]]
