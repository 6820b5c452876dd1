"""A trace as a picture, in SVG: shares, a timeline of steps and requests, one step, the layers.

Colours follow the reader's, light or dark. Its size is bounded, however long the trace was.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from html import escape
from typing import NamedTuple

from jackfield.tracing.accounts import (
    ATTENTION,
    FORWARD,
    STEP,
    STRUCTURES,
    WRITES,
    Accounts,
    Path,
    Record,
    nested,
)
from jackfield.tracing.lives import Life
from jackfield.tracing.recorder import Span
from jackfield.tracing.table import headline, rows

_SVG = "http://www.w3.org/2000/svg"
WIDTH, LEFT, RIGHT = 960, 110, 20
BAR, LANE = 26, 16
INNER = WIDTH - LEFT - RIGHT
REQUESTS = 16  # lanes
LAYERS = 100  # bars
STYLE = """
svg { font: 13px system-ui, sans-serif; }
text { fill: #24292f; }
.dim { fill: #57606a; font-size: 11px; }
.axis { stroke: #8c959f; stroke-width: 1; fill: none; }
.back { fill: #ffffff; }
.forward { fill: #4c8dd6; } .attention { fill: #1f5fa8; } .writes { fill: #7a5cc0; }
.kernels { fill: #2b8a8a; } .sampling { fill: #d9822b; } .loop { fill: #6b9e3f; }
.text { fill: #c2557a; } .rest { fill: #a8b0b8; } .idle { fill: #dfe3e8; }
.waiting { fill: #c9cfd6; } .prefill { fill: #d9822b; } .decode { fill: #4c8dd6; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .dim { fill: #9198a1; } .axis { stroke: #656c76; } .back { fill: #0d1117; }
.forward { fill: #5e9be0; } .attention { fill: #2f73c0; } .writes { fill: #8f74d4; }
.kernels { fill: #3aa3a3; } .sampling { fill: #d08440; } .loop { fill: #78ab4c; }
.text { fill: #cf6a8d; } .rest { fill: #6e7681; } .idle { fill: #2d333b; }
.waiting { fill: #444c56; } .prefill { fill: #d08440; } .decode { fill: #5e9be0; } }
""".strip()

#: The colour of each kind of work, and what it is called in the picture.
_CLASSES = {
    FORWARD: "forward", "compiled step": "forward", "encoder": "forward", ATTENTION: "attention",
    WRITES: "writes", "kernels": "kernels", "sampling": "sampling", STRUCTURES: "sampling",
    "beam search": "sampling", "drafting": "sampling", "text": "text", "emitting": "text",
    "rest": "rest", "idle": "idle",
}  # fmt: skip
_NAMES = {
    "attention": "attention", "writes": "cache writes", "kernels": "kernels",
    "forward": "the model's other layers", "sampling": "sampling", "loop": "schedule and cache",
    "text": "text and emitting", "rest": "rest of the loop", "idle": "idle",
}  # fmt: skip


class Scale(NamedTuple):
    """From ns to places in the picture."""

    begin: int
    end: int

    def x(self, ns: int) -> float:
        span = max(1, self.end - self.begin)
        return LEFT + INNER * min(1.0, max(0.0, (ns - self.begin) / span))


def svg(record: Record, accounts: Accounts) -> str:
    """The whole picture."""
    parts, y = [_text(LEFT, 24, headline(record, accounts))], 44
    for part in (_shares, _timeline, _one_step, _by_layer):
        drawn, height = part(record, accounts, y)
        parts += drawn
        y += height
    title = escape(f"Where the time went: {headline(record, accounts)}")
    return "\n".join(
        [
            f'<svg xmlns="{_SVG}" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="back" width="{WIDTH}" height="{y}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def html(record: Record, accounts: Accounts, table: str) -> str:
    """A page of its own: the picture, and the table below."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>trace of {escape(record.model)}</title>\n<style>\n"
        ":root { color-scheme: light dark; }\n"
        "body { max-width: 62rem; margin: 1rem auto; padding: 0 1rem; "
        "font: 15px system-ui, sans-serif; }\npre { overflow-x: auto; }\n</style>\n</head>\n"
        f"<body>\n<h1>Trace of {escape(record.model)}</h1>\n{svg(record, accounts)}"
        f"<pre>{escape(table)}</pre>\n</body>\n</html>\n"
    )


Part = tuple[list[str], int]


def _shares(record: Record, accounts: Accounts, y: int) -> Part:
    """One bar of all the time, by colour, with its legend."""
    spent: dict[str, int] = dict.fromkeys(_NAMES, 0)
    for path, found in rows(record, accounts):
        if path not in accounts.rows or not accounts.below(path):
            spent[_class(path)] += found.total
    whole = max(1, record.end - record.begin)
    parts, at = [_label(y + 17, "all time")], float(LEFT)
    for name, ns in spent.items():
        width = INNER * ns / whole
        parts += _box(at, y, width, BAR, name, f"{_NAMES[name]}: {ns / 1e6:.2f} ms")
        at += width
    for number, (name, ns) in enumerate((n, ns) for n, ns in spent.items() if ns):
        x, below = LEFT + 284 * (number % 3), y + BAR + 14 + 20 * (number // 3)
        parts += _box(x, below, 12, 12, name)
        parts.append(_text(x + 18, below + 11, f"{_NAMES[name]} {ns / whole:.1%}", "dim"))
    lines = -(-sum(map(bool, spent.values())) // 3)
    return parts, BAR + 14 + 20 * lines + 16


def _class(path: Path) -> str:
    """The colour of a row. What is left of one has that row's: of a forward call, the layers."""
    kind = path[-2] if path[-1] == "rest" and path[0] != path[-2] else path[-1]
    return _CLASSES.get(kind, "loop")


def _timeline(record: Record, accounts: Accounts, y: int) -> Part:
    """The steps in a lane, and a lane for each request, above an axis."""
    begin = min([record.begin, *(life.changes[0][1] for life in record.requests)])
    scale = Scale(begin, record.end)
    steps = [span for span in record.spans if span.work.kind == STEP and span.detail is not None]
    parts = [_label(y + 12, "steps")]
    for name in ("decode", "prefill"):  # those that read prompts are fewer: drawn over the others
        mine = [one for one in steps if ("decode" if one.detail.decode else "prefill") == name]
        parts += _lane(scale, y, [(one.begin, one.end) for one in mine], name)
    y, height = y + LANE + 6, LANE + 6
    for life in record.requests[:REQUESTS]:
        parts += [_label(y + 12, f"request {life.id}"), *_phases(life, record, scale, y)]
        y, height = y + LANE + 2, height + LANE + 2
    left = len(record.requests) - REQUESTS
    if left > 0:
        parts.append(_text(LEFT, y + 12, f"and {left} requests more", "dim"))
        y, height = y + LANE, height + LANE
    parts += _axis(scale, y + 4)
    for number, name in enumerate(("waiting", "prefill", "decode")):
        x = LEFT + 120 * number
        parts += [*_box(x, y + 34, 12, 12, name), _text(x + 18, y + 45, name, "dim")]
    return parts, height + 72


def _phases(life: Life, record: Record, scale: Scale, y: int) -> Iterator[str]:
    for phase in life.phases(record.end):
        x, end = scale.x(phase.begin), scale.x(phase.end)
        name = phase.name if phase.name != "emitting" else "text"
        said = f"request {life.id}: {phase.name} {(phase.end - phase.begin) / 1e6:.2f} ms"
        yield from _box(x, y, max(0.4, end - x), LANE, name, said)


def _lane(scale: Scale, y: int, spans: Seq[tuple[int, int]], name: str) -> Iterator[str]:
    """Boxes; what would be closer together than half a point is one, so there are few."""
    open_at, until = None, 0.0
    for begin, end in spans:
        x, right = scale.x(begin), max(scale.x(end), scale.x(begin) + 0.4)
        if open_at is not None and x - until < 0.5:
            until = max(until, right)
            continue
        if open_at is not None:
            yield from _box(open_at, y, until - open_at, LANE, name)
        open_at, until = x, right
    if open_at is not None:
        yield from _box(open_at, y, until - open_at, LANE, name)


def _one_step(record: Record, accounts: Accounts, y: int) -> Part:
    """The decode step of median length (any step, where none decodes), with what is within it."""
    steps = [span for span in record.spans if span.work.kind == STEP and span.detail is not None]
    steps = [span for span in steps if span.detail.decode] or steps
    if not steps:
        return [], 0
    one = sorted(steps, key=lambda span: span.end - span.begin)[len(steps) // 2]
    inside = [s for s in record.spans if one.begin <= s.begin and s.end <= one.end]
    scale = Scale(one.begin, one.end)
    depth = 0
    parts = [_label(y + 12, "one step")]
    for node in nested(inside):
        level = len(node.path) - 1
        if level == 0 or node.again:
            continue
        depth = max(depth, level)
        x, end = scale.x(node.span.begin), scale.x(node.span.end)
        said = f"{_told(node.span)}: {node.host / 1e3:.0f} µs"
        top = y + (level - 1) * (LANE + 3)
        parts += _box(x, top, max(0.3, end - x), LANE, _class(node.path), said)
    top = y + depth * (LANE + 3)
    parts += _axis(scale, top + 2)
    count = len(one.detail.sequences)
    about = f"a decode step of median length, {count} sequence{'s'[: count != 1]}"
    if not one.detail.decode:
        about = f"a step of {one.detail.tokens} tokens"
    parts.append(_text(LEFT, top + 44, f"{about}; grey is nothing that was timed", "dim"))
    parts.insert(1, "".join(_box(LEFT, y, INNER, LANE, "idle")))
    return parts, depth * (LANE + 3) + 64


def _told(span: Span) -> str:
    layer = f", layer {span.detail}" if span.work.kind in (ATTENTION, WRITES) else ""
    return f"{span.work.name}{layer}"


def _by_layer(record: Record, accounts: Accounts, y: int) -> Part:
    """A bar for each layer: its attention, and on top its cache writes."""
    layers = sorted(accounts.layers.items())[:LAYERS]
    if not layers:
        return [], 0
    height, most = 90, max(sum(times.values()) for _, times in layers) or 1
    width = min(40.0, INNER / len(layers))
    parts = [_label(y + 12, "by layer"), _text(LEFT - 8, y + 30, _ms(most), "dim", "end")]
    parts.append(_text(LEFT - 8, y + height, "0 ms", "dim", "end"))
    for number, (layer, times) in enumerate(layers):
        x, base = LEFT + number * width, float(y + height)
        for kind, name in ((ATTENTION, "attention"), (WRITES, "writes")):
            tall = 70 * times.get(kind, 0) / most
            base -= tall
            said = f"layer {layer}, {kind}: {_ms(times.get(kind, 0))}"
            parts += _box(x + 1, base, max(0.5, width - 2), tall, name, said)
        if len(layers) <= 32 or not layer % 10:
            parts.append(_text(x + width / 2, y + height + 14, str(layer), "dim", "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {y + height}H{LEFT + width * len(layers):g}"/>')
    where = "on the device" if record.device is not None else "on the host"
    said = f"attention and cache writes of each layer, all steps together, {where}"
    parts.append(_text(LEFT, y + height + 34, said, "dim"))
    return parts, height + 50


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3g} ms"


def _axis(scale: Scale, y: float) -> Iterator[str]:
    """A line with round numbers of a unit that suits its length."""
    length = max(1, scale.end - scale.begin)
    unit, name = next(
        (size, name) for size, name in ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))
        if length >= 2 * size or size == 1
    )  # fmt: skip
    rough = length / 8
    tick = 10 ** (len(str(int(rough))) - 1)
    tick *= next((one for one in (1, 2, 5) if tick * one >= rough), 10)
    yield f'<path class="axis" d="M{LEFT} {y:g}H{LEFT + INNER}"/>'
    for number in range(length // tick + 1):
        x = scale.x(scale.begin + number * tick)
        yield f'<path class="axis" d="M{x:.1f} {y:g}v5"/>'
        yield _text(x, y + 18, f"{number * tick / unit:g} {name}", "dim", "middle")


def _text(x: float, y: float, words: str, cls: str = "", anchor: str = "start") -> str:
    named = f' class="{cls}"' if cls else ""
    return f'<text x="{x:.1f}" y="{y:g}"{named} text-anchor="{anchor}">{escape(words)}</text>'


def _label(y: float, words: str) -> str:
    return _text(LEFT - 10, y, words, "dim", "end")


def _box(
    x: float, y: float, width: float, height: float, cls: str, said: str = ""
) -> Iterator[str]:
    if width <= 0 or height <= 0:
        return
    title = f"<title>{escape(said)}</title>" if said else ""
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    yield (
        f'<rect class="{cls}" {shape}>{title}</rect>' if title else f'<rect class="{cls}" {shape}/>'
    )
