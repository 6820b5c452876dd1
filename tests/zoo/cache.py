"""Wrong caches: strangers' pages and rows, by hand, and with the methods of right ones changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cache_pages
import cache_rows
import wrong_caches
from wrong import Wrong

#: Faults by hand whose words are not the name of the method that is wrong.
WORDS = {
    "write": r"write|layer|page|token|spans?|window|request",
    "prepare": r"prepare|input_ids|position|rows|attention_mask|logits",
    "commit": r"commit|page|token|num_cached|request",
    "admit": r"admit",
    "fork": r"fork|num_cached",
    "release": r"release|raised",
}


def _changed() -> Iterator[Wrong]:
    """Right caches with a method that does something else."""
    both = wrong_caches.BOTH
    for layout, make, faults in (
        ("packed", wrong_caches.packed, {**both, **wrong_caches.PACKED, **wrong_caches.FORKS}),
        ("padded", wrong_caches.padded, {**both, **wrong_caches.FORKS}),
    ):
        for name, members in faults.items():
            (method,) = members
            words = WORDS.get(method, method)
            yield Wrong(f"{layout}: {name}", partial(_made, make, members), words)
    for name, make_it in wrong_caches.TRANSFORMERS.items():
        yield Wrong(f"of transformers: {name}", make_it, r"make|update")


def _made(make: Any, members: dict[str, Any]) -> Any:
    return make(**members)


def _by_hand() -> Iterator[Wrong]:
    for name, (kind, design, words) in cache_pages.PAGES.items():
        yield Wrong(f"pages: {name}", cache_pages.of(kind, design), words)
    accepts = partial(cache_pages.NoRefusals, cache_pages.PAGE)
    yield Wrong("pages: accepts everything", accepts, r"does not declare")
    for name, (make, words) in cache_rows.ROWS.items():
        yield Wrong(f"rows: {name}", make, words)


ZOO: tuple[Wrong, ...] = (*_by_hand(), *_changed())
