"""Draws docs/pictures/*.svg: the idea, and how a step's tokens lie in either layout.

Run it after a change: `python tools/pictures.py`. Colours follow the reader's, light or dark.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/pictures"
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f; }
.dim { fill: #6e7781; font-size: 12px; }
.line { stroke: #8c959f; fill: none; stroke-width: 1.5; }
.box { fill: #f6f8fa; stroke: #8c959f; }
.a { fill: #b6e3ff; }
.b { fill: #ffd8b5; }
.c { fill: #c2e8c3; }
.pad { fill: #eaeef2; }
.on { fill: #4051b5; }
text.on { fill: #fff; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.dim { fill: #9198a1; }
.box { fill: #21262d; stroke: #656c76; }
.line { stroke: #656c76; }
.a { fill: #0c4a7a; }
.b { fill: #7a3e0c; }
.c { fill: #1c5c2a; }
.pad { fill: #2d333b; }
.on { fill: #6d7fe0; } }
""".strip()


def svg(name: str, width: int, height: int, title: str, parts: list[str]) -> None:
    body = "\n".join(parts)
    (FOLDER / name).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}">\n<title>{title}</title>\n'
        f"<style>\n{STYLE}\n</style>\n{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, cls: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{cls}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, cls: str = "box") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{cls}"/>'


def arrow(x: float, y: float, down: float) -> str:
    return f'<path class="line" d="M{x:g} {y:g}v{down:g}m-4 -6l4 6l4 -6"/>'


def idea() -> None:
    """Kinds as rows of sockets, one plugged in each."""
    kinds = {
        "attention": ("eager", "sdpa", "triton", "yours"),
        "cache": ("dynamic", "paged", "yours"),
        "quantizer": ("none", "int4-cpu", "yours"),
        "decoding": ("sample", "beam", "yours"),
    }
    chosen = {"sdpa", "paged", "none", "sample"}
    parts = [box(150, 10, 420, 34), text(360, 32, "your call: a model, and a name for each kind")]
    for row, (kind, names) in enumerate(kinds.items()):
        y = 76 + 44 * row
        parts.append(text(110, y + 21, kind, anchor="end"))
        for column, name in enumerate(names):
            x = 130 + 116 * column
            parts += [box(x, y, 104, 32, "on" if name in chosen else "box")]
            parts += [text(x + 52, y + 21, name, "on" if name in chosen else "")]
    parts += [arrow(360, 44, 26), arrow(360, 246, 26)]
    parts += [box(150, 276, 420, 34), text(360, 298, "one plan, one loop, any transformers model")]
    parts += [arrow(360, 310, 26), text(360, 356, "text, and a record of what ran")]
    svg("idea.svg", 640, 370, "One backend of each kind is plugged into any model", parts)


ROWS = (("a", 3, 1), ("b", 1, 1), ("c", 0, 4))  # sequence, cached tokens, tokens of this step
CELL = 40


def padded() -> None:
    """Rows of a batch, aligned at the right; what is cached, then this step's tokens."""
    parts = [text(20, 22, "padded: batch × time", anchor="start")]
    width, cached = max(new for _, _, new in ROWS), max(old for _, old, _ in ROWS)
    for row, (name, old, new) in enumerate(ROWS):
        y = 40 + 46 * row
        parts.append(text(20, y + 25, f"row {row}", "dim", "start"))
        for column in range(cached + width):
            place = (
                column - (cached - old) if column < cached else old + column - cached - width + new
            )
            there = (cached - old <= column < cached) or column >= cached + width - new
            x = 80 + CELL * column
            parts.append(box(x, y, CELL - 4, 34, name if there else "pad"))
            if there:
                parts.append(text(x + 18, y + 22, f"{name}{place}"))
    x = 80 + CELL * cached - 2
    parts.append(f'<path class="line" stroke-dasharray="4 3" d="M{x} 34v142"/>')
    parts += [
        text(x - 8, 192, "cached", "dim", "end"),
        text(x + 8, 192, "this step", "dim", "start"),
    ]
    parts.append(
        text(20, 216, "grey: padding, masked out; a token's position is its number", "dim", "start")
    )
    svg("padded.svg", 400, 230, "The padded layout: rows of a batch, aligned at the right", parts)


def packed() -> None:
    """All tokens of a step in one row, and pages anywhere in a pool."""
    parts = [text(20, 22, "packed: this step's tokens in one row", anchor="start")]
    x = 20
    for name, old, new in ROWS:
        for place in range(old, old + new):
            parts += [box(x, 36, CELL - 4, 34, name), text(x + 18, 58, f"{name}{place}")]
            x += CELL
    parts.append(
        text(20, 104, "keys and values in pages of 2 tokens, anywhere in the pool", anchor="start")
    )
    pages = ("c0 c1", "a2 a3", "", "b0 b1", "a0 a1", "c2 c3")
    for number, held in enumerate(pages):
        left = 20 + 96 * number
        for at, token in enumerate(held.split() or ("", "")):
            parts.append(box(left + 42 * at, 116, 40, 34, token[:1] or "pad"))
            if token:
                parts.append(text(left + 42 * at + 20, 138, token))
        parts.append(text(left + 41, 168, f"page {number}", "dim"))
    tables = (("a", "4 1"), ("b", "3"), ("c", "0 5"))
    parts.append(
        text(20, 202, "block tables: which pages a sequence has, in order", anchor="start")
    )
    for row, (name, numbers) in enumerate(tables):
        left = 20 + 130 * row
        parts += [box(left, 214, 110, 30, name), text(left + 55, 234, f"{name}: {numbers}")]
    svg(
        "packed.svg",
        610,
        260,
        "The packed layout: one row of tokens, keys and values in pages",
        parts,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (idea, padded, packed):
        draw()
