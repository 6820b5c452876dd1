"""Tokens per second with `native-rows` and without it, in turns, on the model inside jackfield.

Give a folder or a hub id for another model.
"""

from __future__ import annotations

import statistics
import sys
import time

import jackfield

ROUNDS, NEW_TOKENS = 5, 32
PROMPTS = ["Once upon a time", "Sort these numbers: 41 7 88 23", "One day Mia"]


def tokens_per_second(engine: jackfield.Engine) -> float:
    begin = time.perf_counter()
    done = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - begin)


def main(model: str) -> None:
    with (
        jackfield.load(model, quantization="plugin:native-rows") as own,
        jackfield.load(model) as other,
    ):
        found: dict[str, list[float]] = {"native-rows": [], "auto": []}
        for turn in range(ROUNDS + 1):
            for name, engine in (("native-rows", own), ("auto", other)):
                speed = tokens_per_second(engine)
                if turn:  # the first is for warming up
                    found[name].append(speed)
        for name, speeds in found.items():
            print(f"{name:>20} {statistics.median(speeds):10.1f} tokens/s")
        print(own.report())  # what was observed to run


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
