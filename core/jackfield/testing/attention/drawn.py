"""Sizes that a model may have: heads, numbers of a head, windows. Many are drawn from the seed.

A kernel that is right for the sizes of one model may be wrong between two powers of two, or beyond
what fits a block. So each range of sizes is tried somewhere, and another seed tries it elsewhere.
"""

from __future__ import annotations

from jackfield.testing.attention.jobs import capabilities_of
from jackfield.testing.subject import Subject

#: Sizes of heads that models have.
SIZES = (8, 10, 64, 80, 96, 112, 128, 160, 192, 256, 512)
#: Ranges of which one more is drawn, where any size is declared.
BETWEEN = (range(12, 64, 2), range(66, 128, 2), range(136, 256, 8), range(264, 512, 8))
#: How many of the sizes that are declared are tried; of more, some are drawn.
MOST = 16

#: (query heads, key heads) that models have: one, many without groups, groups of 3, 7 and 8.
HEADS = ((1, 1), (24, 8), (14, 2), (32, 4), (40, 40))
#: Sizes of groups, of each of which one more is drawn, with any number of key heads.
GROUPS = (range(3, 4), range(5, 6), range(6, 7), range(7, 8), range(9, 17))

#: Ranges of windows, of each of which one is drawn.
WINDOWS = ((5, 16), (17, 64), (65, 256), (257, 512), (513, 1024), (1025, 2048), (2049, 4096))
#: Windows up to which whole prompts are read in one step, which takes memory by the square.
SHORT = 1024


def head_sizes(subject: Subject) -> list[int]:
    """The sizes of heads that are tried: all that are declared, where they are not too many."""
    declared = capabilities_of(subject).head_dims
    chance = subject.random("head sizes")
    if declared is None:
        return sorted({*SIZES, *(chance.choice(between) for between in BETWEEN)})
    if len(declared) <= MOST:
        return sorted(declared)
    ends, usual = {min(declared), max(declared)}, declared & set(SIZES)
    others = sorted(declared - ends - usual)
    return sorted(ends | usual | set(chance.sample(others, min(4, len(others)))))


def head_size(subject: Subject) -> int:
    """A size that is declared, for what does not depend on it."""
    declared = capabilities_of(subject).head_dims
    even = sorted(size for size in declared or (8, 10, 12, 16) if size % 2 == 0 and size <= 64)
    return subject.random("head size").choice(even) if even else min(declared or (8,))


def heads(subject: Subject) -> list[tuple[int, int]]:
    """(query heads, key heads), up to some hundred; without groups where none are declared."""
    chance = subject.random("heads")
    alone = [(chance.randint(*ends),) * 2 for ends in ((17, 32), (33, 64), (65, 130))]
    if "grouped_query" not in capabilities_of(subject).features:
        return sorted({(1, 1), (24, 24), (40, 40), *alone})
    grouped = []
    for sizes in GROUPS:
        group = chance.choice(sizes)
        keys = chance.randint(2, 64 // group)
        grouped.append((group * keys, keys))
    return sorted({*HEADS, *alone, *grouped})


def name(heads: tuple[int, int]) -> str:
    """Of a check of so many heads: "24_on_8"."""
    return f"{heads[0]}_on_{heads[1]}"


def windows(subject: Subject) -> list[tuple[int, int]]:
    """(window, tokens of a prompt that is longer by more than a block of keys), ascending."""
    chance = subject.random("windows")
    found = []
    for ends in WINDOWS:
        window = chance.randint(*ends)
        found.append((window, window + chance.randint(40, 230)))
    return found


def far(subject: Subject) -> int:
    """How many keys the longest text has: more than two bytes can count."""
    return subject.random("far").randint(65_600, 70_000)
