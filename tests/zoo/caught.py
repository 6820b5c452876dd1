"""The share of the zoo that the kit catches, a row for each kind, as Markdown.

OMP_NUM_THREADS=1 python tests/zoo/caught.py [KIND …]
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance")]

from wrong import Wrong, caught, is_named  # noqa: E402

KINDS = ("attention", "cache", "compiler", "decoding", "kernel", "quantizer", "scheduler")


def row(kind: str, zoo: tuple[Wrong, ...]) -> str:
    """How many there are, are caught, and are caught by their fault; who is not goes to stderr."""
    found = [(wrong, caught(wrong)) for wrong in zoo]
    missed = [wrong for wrong, verdict in found if verdict is None]
    unnamed = [wrong for wrong, verdict in found if verdict and not is_named(wrong, verdict)]
    for wrong in missed:
        print(f"{kind}: not caught: {wrong}", file=sys.stderr)
    for wrong in unnamed:
        print(f"{kind}: caught, and its fault not named: {wrong}", file=sys.stderr)
    share = 1 - len(missed) / len(zoo)
    named = len(zoo) - len(missed) - len(unnamed)
    return f"| {kind} | {len(zoo)} | {len(zoo) - len(missed)} | {share:.1%} | {named} |"


def main(kinds: list[str]) -> None:
    print("| kind | wrong backends | caught | share | fault named |\n|---|---|---|---|---|")
    for kind in kinds or KINDS:
        if not (HERE / f"{kind}.py").exists():
            print(f"{kind}: has no zoo", file=sys.stderr)
            continue
        print(row(kind, importlib.import_module(kind).ZOO), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
