"""What a command shows: text and JSON on standard output, everything about it on standard error."""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from jackfield.engine.report import Report

logger = logging.getLogger("jackfield")


class HasDebug(Protocol):
    debug: bool


#: How an encoding that lacks a character shows it: in the name of the error handler.
PLAIN = "jackfield.plain"
#: Columns of what is printed: at least, and where nobody says how many there are.
NARROWEST, UNKNOWN = 40, 80

_LOOKS_LIKE = {"…": "...", "·": "|", "×": "x", "–": "-", "—": "-", "‘": "'", "’": "'"}


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    shown = (_LOOKS_LIKE.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return "".join(shown), error.end


codecs.register_error(PLAIN, _plain)


def say(text: str) -> None:
    """One line on standard error, whatever line breaks are in `text`."""
    with contextlib.suppress(OSError):  # there is no other place to say that it is full or gone
        line = "; ".join(filter(None, map(str.strip, text.splitlines())))
        print(line, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """One JSON object on standard output; a number that JSON does not have becomes null."""
    print(json.dumps(_finite(data), default=str))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def console(*, stderr: bool = False) -> Console:
    """A rich console that takes texts as they are: no markup, no colouring of numbers."""
    from rich.console import Console

    made = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    # COLUMNS may say anything; 0 is what some shells write where they do not know.
    made.width = max(made.width, NARROWEST) if made.width else UNKNOWN
    return made


def table(*headings: str) -> Table:
    """An empty table without lines, which fits into a narrow terminal, too."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headings))
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


#: How a word that says how something stands is coloured.
COLORS = {
    "loaded": "green", "failed": "red", "disabled": "yellow",
    "chosen": "green", "possible": "default", "refused": "red",
}  # fmt: skip


def print_listing(
    out: Console, rows: Sequence[tuple[Sequence[str], Sequence[str]]], words: Sequence[str]
) -> None:
    """Print `rows`, the first of which is a heading; `words[i]` is coloured in row i + 1."""
    from rich.text import Text

    for row, line in _listing(rows, out.width):
        text = Text(line, style="" if row else "bold")
        if row:
            text.highlight_words([words[row - 1]], COLORS[words[row - 1]])
        out.print(text, soft_wrap=True)


def _listing(
    rows: Sequence[tuple[Sequence[str], Sequence[str]]], width: int
) -> Iterator[tuple[int, str]]:
    """(row, line) for each row: its cells in columns, and its notes where there is room for them.

    What does not fit goes on indented lines of its own, so that no name is cut.
    """
    most = [max(map(len, column)) for column in zip(*(cells for cells, _ in rows), strict=True)]
    gap = 2 if sum(most) + 2 * len(most) + _longest_note(rows) <= width else 1
    aligned = sum(most) + gap * (len(most) - 1) <= width
    for row, (cells, notes) in enumerate(rows):
        pieces = [
            cell.ljust(most[at]) if aligned else cell for at, cell in enumerate(cells) if cell
        ]
        line = ""
        for piece in pieces:
            if line and len(line) + gap + len(piece.rstrip()) > width:
                yield row, line.rstrip()
                line = "    "
            line += (" " * gap if line.strip() else "") + piece
        for text in notes:
            if len(line) + gap + len(text) <= width:
                yield row, f"{line}{' ' * gap if line else ''}{text}".rstrip()
            else:
                yield from ((row, one) for one in filter(None, (line.rstrip(),)))
                yield from ((row, f"    {part}") for part in _wrapped(text, width - 4))
            line = ""
        if line:
            yield row, line.rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _longest_note(rows: Sequence[tuple[Sequence[str], Sequence[str]]]) -> int:
    return max((len(text) for _, notes in rows for text in notes[:1]), default=0)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while the block runs, with an estimate of its end; nothing where that
    is no terminal. The block is handed what moves it: how much is done, of how much. What is done
    at the first call took no time.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    errors = console(stderr=True)
    if not errors.is_terminal:
        yield lambda done, of: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as bar:

        def moved(done: int, of: int) -> None:
            if bar.task_ids:
                bar.update(bar.task_ids[0], completed=done, total=of)
            else:
                bar.add_task(what, completed=done, total=of)

        yield moved


def note(text: str) -> None:
    """One dim line on standard error."""
    with contextlib.suppress(OSError):
        console(stderr=True).print(text, style="dim", soft_wrap=True)


def ran(report: Report) -> str:
    """What was observed to run, in one line."""
    parts = [
        f"{o.who} {o.did}"
        for o in report.observations
        if o.calls or o.kind != "decoding"  # one that nobody asked for
    ]
    return " · ".join(map(str, filter(None, (*parts, report.speculation, report.adapter))))


class _Lines(logging.Handler):
    """Every record as one line on what is standard error at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def logged(options: HasDebug) -> Iterator[None]:
    """Show jackfield's warnings while a command runs, and with --debug what was chosen."""
    handler = _Lines()
    handler.addFilter(lambda record: options.debug or record.levelno >= logging.WARNING)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
