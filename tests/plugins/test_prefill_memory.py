"""What a prompt takes at its peak is linear in its length with `sdpa` and `cpu_decode`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield_plugins.attention.cpu_decode.build import KERNEL

SCRIPT = Path(__file__).parent / "measure_prefill.py"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not os.access("/proc/self/clear_refs", os.W_OK), reason="reads memory from Linux's /proc"
    ),
]


def growth(attention: str, cache: str, lengths: tuple[int, ...]) -> list[float]:
    """By what factor the peak grows from each length to the next, every one in a fresh process."""
    # What is freed goes back at once, so that peaks are what is alive, not what was kept.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks = [
        int(
            subprocess.run(
                [sys.executable, str(SCRIPT), attention, cache, str(length)],
                env=env, check=True, capture_output=True, text=True,
            ).stdout
        )
        for length in lengths
    ]  # fmt: skip
    return [b / a for a, b in itertools.pairwise(peaks)]


@pytest.mark.parametrize(
    ("attention", "cache"),
    [
        ("sdpa", "dynamic"),
        ("sdpa", "paged?num_tokens=4352"),
        pytest.param(
            "cpu_decode", "paged?num_tokens=4352",
            marks=pytest.mark.skipif(bool(KERNEL.cannot_build()), reason="needs a C++ compiler"),
        ),
    ],
)  # fmt: skip
def test_twice_the_prompt_takes_twice_the_memory(attention: str, cache: str) -> None:
    assert max(growth(attention, cache, (1024, 2048, 4096))) <= 2.3


def test_what_is_quadratic_is_seen() -> None:
    assert growth("eager", "dynamic", (2048, 4096))[0] > 3
