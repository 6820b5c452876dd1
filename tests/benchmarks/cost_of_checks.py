"""What a step of the packed layout pays for the checks of its cache: `python` runs it and prints.

Each call's time less that of the cache's own method, in microseconds; the median of 110 steps of
the model inside the package, one request, one thread; and the worst, in which pages are read back.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import torch

import jackfield
from jackfield.engine.checked_packed import CheckedPackedCache
from jackfield_plugins.cache.paged.store import PagedKVCache

NAMES = ("portions", "fits", "prepare", "write", "commit")
Times = defaultdict[str, list[float]]


def timed(cls: Any, name: str, times: Times) -> None:
    own = getattr(cls, name)

    def method(self: Any, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return own(self, *args)
        finally:
            times[name].append(1e6 * (time.perf_counter() - began))

    setattr(cls, name, method)


def main() -> None:
    torch.set_num_threads(1)
    own, checked = Times(list), Times(list)
    for name in NAMES:
        timed(PagedKVCache, name, own)
        timed(CheckedPackedCache, name, checked)
    with jackfield.load("demo", cache_implementation="paged") as engine:
        for _ in range(2):
            own.clear()
            checked.clear()
            engine.generate([5, 6, 7], max_new_tokens=110, min_new_tokens=110)
    for name in NAMES:
        extra = [a - b for a, b in zip(checked[name], own[name], strict=True)]
        calls = max(1, len(extra) // len(checked["commit"]))
        steps = [sum(extra[i : i + calls]) for i in range(0, len(extra), calls)]
        sys.stdout.write(
            f"{name:9} {statistics.median(steps):6.1f} us a step, worst {max(steps):6.1f}\n"
        )


if __name__ == "__main__":
    main()
