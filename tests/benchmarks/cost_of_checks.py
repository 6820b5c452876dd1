"""What a step pays for the checks of plugins: `python` runs it and prints.

Four processes take turns, one at a time, some tens of milliseconds each, so that they share
whatever else the machine does: without any check, the same again (what differs there is noise),
with the checks where all backends are jackfield's own, and where another distribution offers them.
No clock stands around a call: a turn's figure is the lower quartile of its steps, in processor time
of the thread that takes them. Told is the median, over turns, of what a process has more than the
first, and the quartiles. The model is the one inside the package, with one request and one thread.
In the steps that are compared its layers hand random queries, keys and values to the attention and
compute nothing else: what a whole step takes, many times the checks, would drown them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

STARTS = 2
TURNS = 40
STEPS = 110
ARMS = ("none", "none again", "own", "stranger")


class _NoGuard:
    """Stands for `guarded`, and guards nothing."""

    def __init__(self, *_: object) -> None:
        self.layer: int | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Scheduler:
    """A schedule as it is, in place of a checked one."""

    def __init__(self, inner: Any, *_: object, **__: object) -> None:
        self.key, self.schedule, self.patience = inner.key, inner.schedule, inner.patience

    def starved(self) -> tuple[()]:
        return ()


def unchecked() -> None:
    """Take every check of a plugin out of this process."""
    from jackfield.bridge import attention
    from jackfield.engine import assembly, bound, decoder

    modules: list[Any] = [attention, bound, assembly, decoder]
    attention, bound, assembly, decoder = modules
    attention.guarded = _NoGuard
    attention.AttentionBinding._check = lambda *_: None
    bound.held_to_contract = lambda cache, *_: cache
    assembly.CheckedSchedule = _Scheduler
    decoder.checked = lambda strategy, *_: strategy


def strange() -> None:
    """Have another distribution offer every backend."""
    from jackfield.registry.discovery import registry

    found = registry().backends
    for kind in ("attention", "cache", "scheduler", "decoding"):
        found[kind] = [replace(one, distribution="stranger") for one in found[kind]]


def bare(engine: Any) -> Any:
    """A forward call of one token in which layers attend and do nothing else."""
    import torch

    config, attention = engine._bound.model.config, engine._bound.attention
    shapes = [
        (1, n, 1, config.head_dim)
        for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)
    ]
    states = [torch.randn(shape) for shape in shapes]
    modules = [layer.self_attn for layer in engine._bound.model.model.layers]
    logits = torch.randn(1, 1, config.vocab_size)

    def forward(_: Any) -> Any:
        for module in modules:
            attention.forward(module, *states, None, scaling=module.scaling)
        return logits.clone()

    return forward


def run(arm: str) -> None:
    """Take a turn for each line that comes, and answer with its figure; before, a whole step's."""
    import torch

    import jackfield

    if arm == "stranger":
        strange()
    elif arm != "own":
        unchecked()
    torch.set_num_threads(1)
    times: list[float] = []
    with jackfield.load("demo", cache_implementation="paged", attn_implementation="sdpa") as engine:
        loop: Any = engine._loop
        step = loop.step

        def timed() -> Any:
            began = time.thread_time_ns()
            found = step()
            times.append((time.thread_time_ns() - began) / 1000)
            return found

        loop.step = timed
        for number, _ in enumerate(sys.stdin):
            times.clear()
            engine.generate([5], max_new_tokens=STEPS, min_new_tokens=STEPS)
            sys.stdout.write(f"{statistics.quantiles(times, n=4)[0]}\n")
            sys.stdout.flush()
            if number == 0:
                engine._bound._forward = bare(engine)


def turns() -> list[dict[str, float]]:
    """The figures of all arms in each turn of freshly started processes."""
    command = [sys.executable, __file__]
    pipe: Any = subprocess.PIPE
    started = {
        arm: subprocess.Popen([*command, arm], stdin=pipe, stdout=pipe, text=True, bufsize=1)
        for arm in ARMS
    }

    def turn(process: Any) -> float:
        process.stdin.write("\n")
        return float(process.stdout.readline())

    found = [{arm: turn(process) for arm, process in started.items()} for _ in range(TURNS + 1)]
    for process in started.values():
        process.stdin.close()
        process.wait()
    return found


def main() -> None:
    if len(sys.argv) > 1:
        run(sys.argv[1])
        return
    starts = [turns() for _ in range(STARTS)]
    step = statistics.median(start[0][arm] for start in starts for arm in ARMS)
    found = [turn for start in starts for turn in start[2:]]
    for arm in ARMS[1:]:
        low, middle, high = statistics.quantiles([turn[arm] - turn["none"] for turn in found], n=4)
        sys.stdout.write(
            f"{arm:10} {middle:6.1f} us a step of {step:.0f} us ({100 * middle / step:.1f} %), "
            f"quartiles {low:.1f} and {high:.1f}\n"
        )


if __name__ == "__main__":
    main()
