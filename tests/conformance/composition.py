"""The composition tables: what was combined on every family, run and written down.

    python tests/conformance/composition.py            # runs all of it, writes docs/composition.md

A cell is refused by a plan, with the reason, or it gives the tokens of an oracle in every mode.
Anything else is a third outcome, and there must be none. What a mode is: see `cells_of_*.py`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cells_of_attention
import cells_of_compiling
import cells_of_decoding
import cells_of_quantizing
import torch
from cells import ALL, Cell
from composition_page import ATTENTION, COMPILING, DECODING, QUANTIZING, Table, page

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
TABLES: dict[Table, Callable[[str], list[Cell]]] = {
    ATTENTION: cells_of_attention.cells,
    DECODING: cells_of_decoding.cells,
    COMPILING: cells_of_compiling.cells,
    QUANTIZING: cells_of_quantizing.cells,
}


def run(families: Iterable[str] = ALL) -> dict[Table, list[Cell]]:
    """Every cell of every table: a process a core, since tiny tensors keep one busy at most."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        os.cpu_count(), fresh, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        found = list(pool.map(of_family, families))
    return {
        table: list(itertools.chain.from_iterable(own[number] for own in found))
        for number, table in enumerate(TABLES)
    }


def of_family(family: str) -> list[list[Cell]]:
    """The family's cells of each table."""
    return [cells(family) for cells in TABLES.values()]


def wrong(tables: dict[Table, list[Cell]]) -> list[Cell]:
    cells = itertools.chain.from_iterable(tables.values())
    return [cell for cell in cells if cell.outcome == "wrong"]


if __name__ == "__main__":
    tables = run()
    PAGE.write_text(page(tables))
    third = wrong(tables)
    raise SystemExit("\n".join(map(str, third)) if third else 0)
