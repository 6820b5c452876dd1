"""What a trace costs: the same texts with one and without, in turns: `python` runs it and prints.

Times are those of the thread's steps as a whole, from the request to its completion, in
milliseconds a step; and spans a step with what one of them costs, which is what the difference must
be. The processor's clock moves more from text to text than a trace costs, so read the medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

import jackfield
from jackfield.tracing.recorder import Recorder, Work

TURNS, TOKENS = 40, 60


def once(engine: jackfield.Engine, rows: int, *, traced: bool) -> tuple[float, float]:
    """Milliseconds of processor time a step, and spans a step."""
    asked: Any = {"max_new_tokens": TOKENS, "eos_token_id": []}
    prompts = [[5 + (7 * row + at) % 300 for at in range(16)] for row in range(rows)]
    before = engine.statistics().steps
    if not traced:
        begin = time.process_time()
        engine.generate(prompts, **asked)
        return 1000 * (time.process_time() - begin) / (engine.statistics().steps - before), 0.0
    with engine.trace() as trace:
        begin = time.process_time()
        engine.generate(prompts, **asked)
        spent = time.process_time() - begin
    steps = engine.statistics().steps - before
    return 1000 * spent / steps, len(trace.record.spans) / steps


def of_a_span() -> float:
    """Microseconds that one span takes."""
    recorder = Recorder()
    plain = lambda first: None  # noqa: E731
    timed = recorder.timed(plain, Work("attention", "attention"), lambda args: args[0])
    taken = []
    for call in (plain, timed):
        begin = time.perf_counter()
        for number in range(100_000):
            call(number)
        taken.append((time.perf_counter() - begin) * 10)
    return taken[1] - taken[0]


def main() -> None:
    torch.set_num_threads(1)
    sys.stdout.write(f"a span takes {min(of_a_span() for _ in range(20)):.2f} us\n")
    for compiler, rows in (("none", 1), ("none", 8), ("none", 32)):
        with jackfield.load("demo", compile=compiler) as engine:
            once(engine, rows, traced=False)
            pairs = []
            for turn in range(TURNS):
                first = once(engine, rows, traced=bool(turn % 2))
                second = once(engine, rows, traced=not turn % 2)
                pairs.append((second, first) if turn % 2 else (first, second))
        off, on = (statistics.median(pair[at][0] for pair in pairs) for at in (0, 1))
        ratio = statistics.median(pair[1][0] / pair[0][0] for pair in pairs)
        spans = pairs[0][1][1]
        sys.stdout.write(
            f"{compiler}, {rows:2} rows: {off:.3f} ms a step off, {on:.3f} on; on over off, median "
            f"of pairs {100 * (ratio - 1):+.2f} %; {spans:.0f} spans a step\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
