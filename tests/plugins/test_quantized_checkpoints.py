"""Checkpoints of quantizers, damaged: each is refused, or is what plain transformers computes.

A few of each quantizer here, all that `quantized_mutants.py` makes with `-m long`; each quantizer
in a process of its own, since what reads past a buffer may end it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import extras
import pytest

if TYPE_CHECKING:
    from forking import Forks

SCRIPT = Path(__file__).with_name("quantized_mutants.py")
LIBRARY = {"bnb": "bitsandbytes", "torchao": "torchao", "gptq": "gptqmodel"}
GPTQ = "gptq?samples=2"
SELECTIONS = ("bnb-4bit?double_quantization=true", "bnb-8bit", "torchao", "int4-cpu?head=8", GPTQ)


def counts(forks: Forks, selection: str, *arguments: str) -> tuple[int, int, int]:
    """How many were caught, harmless and wrong."""
    library = LIBRARY.get(selection.partition("-")[0].partition("?")[0])
    if library is not None:
        extras.needs(library)
    done = forks.python(SCRIPT, selection, *arguments, timeout=1500)
    assert done.returncode == 0, f"after: {done.stderr[-800:]}"
    if done.stdout.startswith("UNUSABLE"):
        pytest.skip(done.stdout.strip())
    assert "WRONG" not in done.stdout, done.stdout[-3000:]
    caught, harmless, wrong = map(int, done.stdout.split("|")[3:6])
    return caught, harmless, wrong


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.one_in(5)
def test_some(selection: str, forks: Forks) -> None:
    caught, harmless, wrong = counts(forks, selection, "--some", "30")
    assert caught >= 15
    assert harmless >= 1
    assert wrong == 0


@pytest.mark.long
@pytest.mark.parametrize("selection", [*SELECTIONS, "bnb-4bit", "torchao?group_size=32",
                                       "int4-cpu", "int8-cpu"])  # fmt: skip
def test_all(selection: str, forks: Forks) -> None:
    caught, _, wrong = counts(forks, selection)
    assert caught >= 100
    assert wrong == 0
