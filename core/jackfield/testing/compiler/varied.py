"""Checks of a compiled step over what varies from step to step: sizes, columns, positions, tokens.

Few shapes show whether a compiler is right, and many whether it is right for all. Each shape may
take a compiler seconds, and others nothing: so as many are tried as there is time for, in an order
that is drawn from the seed, and that has some of each range first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from jackfield.testing.checks import Check
from jackfield.testing.compiler.steps import LIMIT, PLACES, Compiled, inputs, main_dtype, tried
from jackfield.testing.subject import Subject

Shape = tuple[int, int, "tuple[int, ...] | None"]  # rows, tokens a row, columns that are wanted

#: Of each of these one size is tried before all others.
RANGES = (range(5, 9), range(9, 17), range(17, 34), range(2, 5))
MOST = 33  # rows, or tokens of a row
MIXED = 24  # shapes of several rows of several tokens
PATIENCE = 5.0  # seconds for shapes beyond the first of each range

#: Ends of the ranges of positions.
POSITIONS = (0, 64, 256, 2048, 4096, 8192, 32_768, 65_536, PLACES)
#: Ranges of vocabularies, of each of which one is drawn: two bytes count the first.
VOCABULARIES = ((32_769, 65_536), (262_145, 270_000))


def checks(subject: Subject) -> Iterator[Check]:
    """All of them."""
    of = partial(tried, subject)
    yield Check("step.sizes", "contract", of(_sizes), limit=LIMIT)
    yield Check("step.columns", "contract", of(_columns), limit=LIMIT)
    yield Check("step.positions", "contract", of(_positions), limit=LIMIT)
    drawn = subject.random("vocabularies")
    sizes = tuple(drawn.randint(*ends) for ends in VOCABULARIES)
    yield Check("step.vocabularies", "contract", of(_vocabulary), cases=sizes, limit=LIMIT)


def _sizes(subject: Subject, _: object) -> str:
    """Batches that decode, padded and packed, and prompts, of every size up to some dozens."""
    compiled = Compiled(subject, main_dtype(subject))
    shapes = list(dict.fromkeys(_filled(compiled, s) for s in _shapes(subject.random("sizes"))))
    begin, tried = time.perf_counter(), 0
    for number, shape in enumerate(shapes):
        if number >= 2 * len(RANGES) and time.perf_counter() - begin > PATIENCE:
            break
        rows, width, columns = shape
        wanted = "all columns" if columns is None else _count(len(columns), "column")
        given = inputs(shape, number, subject.device)
        compiled.check(given, f"{_count(rows, 'row')} of {width}, {wanted}")
        tried += 1
    return f"{tried} of {len(shapes)} shapes"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shapes(drawn: random.Random) -> Iterator[Shape]:
    """One of each range, of rows and of tokens; then all, in any order."""
    for sizes in RANGES:
        yield drawn.choice(sizes), 1, None
        yield 1, drawn.choice(sizes), None
    others: list[Shape] = [(rows, 1, None) for rows in range(1, MOST + 1)]
    others += [(1, width, None) for width in range(1, MOST + 1)]
    for _ in range(MIXED):
        rows, width = drawn.randint(1, 9), drawn.randint(1, MOST)
        wanted = drawn.sample(range(width), drawn.randint(1, width))
        others.append((rows, width, drawn.choice((None, tuple(wanted)))))
    drawn.shuffle(others)
    yield from others


def _filled(compiled: Compiled, shape: Shape) -> Shape:
    """The shape as an engine fills it up, for which alone a step has to be right."""
    rows, width, columns = shape
    fill = compiled.compilation.fill
    if columns is not None:
        columns += (0,) * (fill(len(columns)) - len(columns))
    return fill(rows), fill(width), columns


def _columns(subject: Subject, _: object) -> None:
    """Other columns, as many as before, in new tensors and in the same one."""
    compiled, drawn = Compiled(subject, main_dtype(subject)), subject.random("columns")
    _, width, wanted = _filled(compiled, (1, 12, (0, 1, 2)))
    assert wanted is not None
    count = len(wanted)
    ids, places, keep = inputs((1, width, wanted), 1, subject.device)
    compiled.check((ids, places, keep), f"{count} columns")
    for number in range(6):
        other = torch.tensor(drawn.choices(range(width), k=count), device=subject.device)
        what = f"{count} columns, then as many others"
        if number % 2:
            keep.copy_(other)
            compiled.check((ids, places, keep), f"{what} in the same tensor")
        else:
            compiled.check((ids, places, other), what)


def _positions(subject: Subject, _: object) -> str:
    """Positions of every size: those of short texts first."""
    compiled, drawn = Compiled(subject, main_dtype(subject)), torch.Generator().manual_seed(1)
    rows, width, _none = _filled(compiled, (2, 3, None))
    ids = inputs((rows, width, None), 1, subject.device)[0]
    for first, end in pairwise(POSITIONS):
        places = torch.randint(first, end, ids.shape, generator=drawn).to(subject.device)
        compiled.check((ids, places, None), f"positions from {first} to {end - 1}")
    return f"up to {PLACES:,}"


def _vocabulary(subject: Subject, size: int) -> None:
    """Logits of as many tokens as large models have, and ids from first to last."""
    compiled = Compiled(subject, main_dtype(subject), vocab=size)
    rows, width, _none = _filled(compiled, (2, 3, None))
    for seed in range(2):
        given: Any = inputs((rows, width, None), seed, subject.device, vocab=size)
        given[0][0, 0] = size - 1
        compiled.check(given, f"a vocabulary of {size:,} tokens")
