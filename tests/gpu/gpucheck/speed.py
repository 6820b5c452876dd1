"""Decoding and reading by engines and by plain transformers, timed in turn on equal weights."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpucheck.bandwidth import copied
from gpucheck.bench import Bench
from gpucheck.engines import loaded
from gpucheck.judging import Tokens, bound_of, verdict
from gpucheck.models import prompts_of, random_model, read_bytes
from gpucheck.results import SkippedError, Values

#: `run(count)`: continue all prompts by `count` tokens.
Run = Callable[[int], Tokens]

AT_FIRST = 5  # tokens
JUDGED = 2  # texts
PROFILED = 6  # steps: the prompts', and five that decode


@dataclass(frozen=True)
class Race:
    """One model for engines, its twin for plain transformers, and the prompts of both."""

    bench: Bench
    model: Any
    twin: Any
    prompts: Tokens
    bandwidth: float  # bytes a second
    bound: float  # by how much a logit may be below the best one

    @classmethod
    def of(cls, bench: Bench, count: int, length: int) -> Race:
        """Raises SkippedError where the model does not fit twice, which is a result then."""
        sizes, device = bench.sizes, bench.device.name
        models: list[Any] = []
        with bench.results.check("two models with random weights") as found:
            models += (random_model(sizes.large, device, sizes.large_dtype) for _ in range(2))
            bench.device.wait()
            found["bytes"] = sum(p.nbytes for p in models[0].parameters())
        if len(models) < 2:
            raise SkippedError("the models were not made")
        texts = prompts_of(count, length, sizes.large["vocab_size"])
        bound = bound_of(models[1], texts[:JUDGED])
        return cls(bench, *models, texts, copied(bench), bound)

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor(self.prompts, device=self.bench.device.name)

    def step_bytes(self) -> float:
        """What one step reads at least: the weights, and the keys and values of all rows."""
        sizes, config = self.bench.sizes, self.model.config
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        tokens = len(self.prompts) * (len(self.prompts[0]) + sizes.decode_tokens / 2)
        return read_bytes(self.model) + numbers * tokens * self.model.dtype.itemsize

    def verdict(self, judge: Any, expected: Tokens, texts: Tokens) -> Values:
        """Whether the first texts are right, by the one of the two models that did not write them.

        The other may be bound to what wrote them still.
        """
        some = slice(JUDGED)
        return verdict(judge, self.prompts[some], expected[some], texts[some], self.bound)

    def generate(self, count: int, **more: Any) -> Tokens:
        """Plain `generate`, its cache growing."""
        found = self.twin.generate(self.ids, max_new_tokens=count, do_sample=False, **more)
        return found[:, len(self.prompts[0]) :].tolist()  # type: ignore[no-any-return]

    def generate_static(self, count: int) -> Tokens:
        """`generate` with a static cache, whose steps transformers compiles on a GPU."""
        return self.generate(count, cache_implementation="static")

    def seconds(self, run: Run, count: int) -> float:
        started = time.perf_counter()
        run(count)
        self.bench.device.wait()
        return time.perf_counter() - started

    def in_turn(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """Seconds a step of decoding of each, which take turns: medians.

        The time of a few tokens is taken off, so that reading the prompts is not counted, nor the
        warming-up that a compiled step does again for each new cache.
        """
        sizes = self.bench.sizes
        taken: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(sizes.rounds):
            for label, run in runs.items():
                first = self.seconds(run, AT_FIRST)
                whole = self.seconds(run, AT_FIRST + sizes.decode_tokens)
                # Of tiny models, what passes by chance may be more than the steps take.
                taken[label].append(max(whole - first, 1e-9) / sizes.decode_tokens)
        return {label: statistics.median(seconds) for label, seconds in taken.items()}

    def figures(self, seconds: float) -> Values:
        """What seconds a step come to."""
        return {
            "tokens_per_second": len(self.prompts) / seconds,
            "milliseconds_a_step": 1000 * seconds,
            "share_of_bandwidth": self.step_bytes() / seconds / self.bandwidth,
        }


def race_engine(
    race: Race,
    label: str,
    arguments: Mapping[str, Any],
    expected: Tokens,
    aims: Mapping[str, float],
) -> float | None:
    """An engine against plain `generate`: texts first, then time.

    `aims`: at least so much of a figure. Returns the seconds a step; None where it did not run.
    """
    bench, count = race.bench, race.bench.sizes.decode_tokens
    if label in bench.results.made:
        return None
    started = time.perf_counter()
    with bench.results.check(label) as found, loaded(race.model, arguments) as engine:

        def ours(tokens: int) -> Tokens:
            done = engine.generate(race.prompts, max_new_tokens=tokens)
            return [completion.token_ids for completion in done]

        found["seconds_to_load"] = time.perf_counter() - started
        texts = ours(count)  # and all that is compiled or recorded is so now
        seconds = race.in_turn({"ours": ours, "generate": race.generate})
        found.update(race.figures(seconds["ours"]))
        found["times_generate"] = seconds["generate"] / seconds["ours"]
        found["milliseconds_of_generate"] = 1000 * seconds["generate"]
        report = engine.report()
        found["source"] = report["attention"].source
        found["compiled"] = str(report["compiler"].compiled or "")
        found["chosen"] = "{cache}, {attention}, {compiler}".format_map(
            {kind: engine.plan[kind].registered.name for kind in ("cache", "attention", "compiler")}
        )
        missed = [f"{name} {least}" for name, least in aims.items() if found[name] < least]
        found["met"] = not missed
        found["aim"] = ", ".join(f"{name} at least {least}" for name, least in aims.items())
    with bench.results.check(f"{label}: texts") as judged:
        if "tokens_per_second" not in found:
            raise SkippedError("it did not run")
        judged.update(race.verdict(race.twin, expected, texts))
    return len(race.prompts) / found["tokens_per_second"] if "tokens_per_second" in found else None


def profile_engine(race: Race, label: str, arguments: Mapping[str, Any]) -> None:
    """Where the time of an engine goes, once engines were timed.

    What a profile leaves on slows all later launches of its process by a tenth or more.
    """
    name = f"{label}: profile"
    if name in race.bench.results.made:
        return
    with race.bench.results.check(name) as found, loaded(race.model, arguments) as engine:

        def ours() -> None:
            engine.generate(race.prompts, max_new_tokens=PROFILED)

        ours()
        found["profile"] = profiled(race.bench, ours)
        found["host_share"] = found["profile"]["host_share"]


def race_rival(race: Race, label: str, run: Run, expected: Tokens) -> float | None:
    """A way of transformers itself, after a warm-up. Returns the seconds a step, as above."""
    if label in race.bench.results.made:
        return None
    with race.bench.results.check(label) as found:
        texts = run(AT_FIRST + race.bench.sizes.decode_tokens)
        found.update(race.figures(race.in_turn({label: run})[label]))
        cut = [text[: len(expected[0])] for text in texts]
        found.update(race.verdict(race.model, expected, cut))
    return len(race.prompts) / found["tokens_per_second"] if "tokens_per_second" in found else None


#: A call of CUDA's runtime or driver (cudaLaunchKernel, cuLaunchKernelEx); `cutlass_…` is a kernel.
DRIVER = re.compile(r"cu(da)?[A-Z]")


def profiled(bench: Bench, run: Callable[[], Any]) -> Values:
    """How long the device was at work, of the time that passed, and on what."""
    activities = {torch.profiler.ProfilerActivity.CPU, bench.device.profiled}
    bench.device.wait()
    with torch.profiler.profile(activities=list(activities)) as profiler:
        started = time.perf_counter()
        run()
        bench.device.wait()
        passed = time.perf_counter() - started
    events = list(profiler.events() or ())
    spent: dict[str, float] = {}
    for event in filter(bench.device.works, events):
        spent[event.name] = spent.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
    calls: dict[str, int] = {}
    for event in events:
        if DRIVER.match(event.name):
            calls[event.name] = calls.get(event.name, 0) + 1
    busy = sum(spent.values())
    return {
        "steps": PROFILED,
        "seconds": passed,
        "device_seconds": busy,
        "host_share": max(0.0, 1 - busy / passed),
        "longest": dict(sorted(spent.items(), key=lambda item: -item[1])[:8]),
        "calls_of_the_driver": dict(sorted(calls.items(), key=lambda item: -item[1])[:8]),
    }
