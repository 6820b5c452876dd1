"""Measures contenders in turn, each in a process of its own."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from jackfield.benchmarking.contenders import Contender
from jackfield.benchmarking.judging import judged
from jackfield.benchmarking.nursery import Nursery
from jackfield.benchmarking.results import Benchmark, Round, Row, ordered
from jackfield.benchmarking.surroundings import surroundings
from jackfield.benchmarking.verdicts import CONFIDENCE, MARGIN
from jackfield.benchmarking.worker import LOADING, ROUND, Worker
from jackfield.benchmarking.workload import Workload
from jackfield.devices import free_bytes
from jackfield.errors import ExecutionError, JackfieldError, PlanError, UsageError
from jackfield.units import in_units

#: How many rounds there are where nobody says, and of the warm-up at least and at most.
ROUNDS = 15
WARM_UP = (2, 6)
#: A round of the warm-up that is not so much faster than the best before says that it is over.
SETTLED = 0.97
#: Seconds between two rounds, in which threads of the one before stop to spin.
PAUSE = 0.05
#: The number of a round that comes behind all others.
BEHIND = 1 << 30

Tell = Callable[[int, int], None]


def bench(
    contenders: Sequence[Contender],
    workload: Workload,
    *,
    base: str | None = None,
    rounds: int = ROUNDS,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
    seconds: float = ROUND,
    progress: Tell = lambda done, of: None,
) -> Benchmark:
    """Run the workload `rounds` times with each contender, in turn, and judge what they did.

    `base` is the label of the row that others are compared with; None: the first. A contender
    that is refused, fails, or hangs (a round of more than `seconds`) is a row with its reason, and
    the others go on; so is one whose tokens are not the model's, or that did not run what it asked
    for. `progress` is called with how much is done, of how much. Raises UsageError where nothing
    can be measured at all, or where not all models fit into memory together.
    """
    _check(contenders, base, rounds, margin)
    running = [Running(one, workload, seconds) for one in contenders]
    done, steps = 0, len(running) * (rounds + 3)

    def step(count: int = 1) -> None:
        nonlocal done
        done += count
        progress(done, steps)

    with contextlib.ExitStack() as open_ones:
        check_plans(contenders)
        step(0)
        for one in running:
            one.start(open_ones)
            step()
        _check_any(running)
        for one in running:
            one.warm_up()
            step()
        for number in range(rounds):
            for one in ordered(running, number):
                one.round(number)
                step()
        rates: dict[str, tuple[float, float]] = {}
        for one in running:
            one.finish(rates)
            step()
    rows = judged([one.row for one in running], [one.texts for one in running], workload)
    label = base or contenders[0].label
    return Benchmark(tuple(rows), workload.to_dict(), label, margin, confidence, surroundings(rows))


def _check(contenders: Sequence[Contender], base: str | None, rounds: int, margin: float) -> None:
    if not contenders:
        raise UsageError("there is nothing to measure; name a selection")
    if type(rounds) is not int or rounds < 1:
        raise UsageError(f"rounds must be a whole number, at least 1, not {rounds!r}")
    if not 0 < margin < 1:
        raise UsageError(f"margin must be above 0 and below 1, such as 0.05, not {margin!r}")
    labels = [one.label for one in contenders]
    if base is not None and base not in labels:
        raise UsageError(f"there is no row {base!r} to compare with (rows: {', '.join(labels)})")


def check_plans(contenders: Sequence[Contender]) -> None:
    """Raise UsageError where the models do not fit beside one another, since all stay loaded.

    Also what `jackfield.load` would raise, but for a plan that cannot be: that is a row.
    """
    from jackfield.api import prepare

    needed: dict[str, int] = {}
    for one in contenders:
        try:
            plan = prepare(**one.arguments).plan
        except PlanError:
            continue  # its row says why
        if plan["decoding"].backend.capabilities.forks:
            raise UsageError(
                f"{one.label}: a search chooses other texts than greedy decoding, by which rows "
                "are compared; measure it by itself, or another decoding"
            )
        if plan.requirements.encoder is not None:
            raise UsageError(
                f"{one.label}: {plan.requirements.encoder}, and rows are compared with a decoder "
                "that is computed again; give a decoder"
            )
        device = plan.device or "cpu"
        needed[device] = needed.get(device, 0) + plan.requirements.weight_bytes
    for device, size in needed.items():
        free = free_bytes(device)
        if free is not None and size > free:
            raise UsageError(
                f"the weights of all rows take {in_units(size)} of {device} together, and "
                f"{in_units(free)} are free; measure fewer rows at a time, or a smaller model"
            )


def _check_any(running: Sequence[Running]) -> None:
    """Raise what the first one raised where none could be loaded."""
    errors = [one.error for one in running]
    if all(errors):
        raise next(error for error in errors if error)


def begun(nursery: Nursery | None) -> Worker:
    return Worker() if nursery is None else Worker(nursery)


@dataclass
class Running:
    """A contender while it is measured. `texts` has every text that each request got.

    A round may take `seconds`, and to load it `loading`, neither more than is `left` then; it has
    failed where it takes longer. Its process is forked in the `nursery`; None: it begins from
    nothing.
    """

    contender: Contender
    workload: Workload
    seconds: float
    loading: float = LOADING
    nursery: Nursery | None = None
    left: Callable[[], float] = lambda: math.inf
    worker: Worker | None = None
    error: JackfieldError | None = None
    texts: list[dict[tuple[int, ...], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        one = self.contender
        self.row = Row(one.label, one.program, one.arguments)
        self.texts = [{} for _ in self.workload.requests]

    def start(self, open_ones: contextlib.ExitStack) -> None:
        requests = [(one.prompt, one.new_tokens, one.arrival) for one in self.workload.requests]
        try:
            self.worker = open_ones.enter_context(begun(self.nursery))
        except OSError as error:
            self._failed(ExecutionError(f"no process can be begun: {error.strerror}"))
        except JackfieldError as error:
            self._failed(error)
        arguments = dict(self.contender.arguments)
        if self.contender.ours:
            arguments.setdefault("max_batch_size", self.workload.batch)
        else:
            arguments["batch"] = self.workload.batch
        program = self.contender.program
        given: dict[str, Any] = {"program": program, "arguments": arguments, "requests": requests}
        found = self.ask("load", self.loading, **given)
        self._with(**(found or {}))

    def warm_up(
        self, most: int = WARM_UP[1], hopeless: Callable[[Round], bool] = lambda one: False
    ) -> None:
        """Run until a round is no faster than the best before, and count from there.

        It is left before its end with a round that is `hopeless`, but for the first.
        """
        times: list[float] = []
        while len(times) < most:
            found = self._run(-1 - len(times))
            if found is None or (times and hopeless(found)):
                return
            settled = len(times) >= WARM_UP[0] - 1 and found.seconds > SETTLED * min(times)
            times.append(found.seconds)
            if settled:
                break
        self._with(warm_up=tuple(times))
        self.ask("settled")

    def round(self, number: int) -> None:
        if found := self._run(number):
            self._with(rounds=(*self.row.rounds, found))

    def observe(self) -> bool:
        """Ask for the peak of memory and what was observed to run; whether it could say."""
        found = self.ask("finish")
        self._with(**(found or {}))
        return found is not None

    def finish(self, rates: dict[str, tuple[float, float]]) -> None:
        """Ask what was observed, and what the device can do; then end the process."""
        if self.observe():
            if self.contender.ours:
                self._with(operators=self.ask("operators", number=BEHIND))
            arguments, batch = dict(self.contender.arguments), self.workload.batch
            if limits := self.ask("limits", arguments=arguments, batch=batch, rates=rates):
                rates[limits["where"]] = limits["bandwidth"], limits["flop_rate"]
                self._with(limits=limits)
        if self.worker is not None:
            self.worker.close()

    def _run(self, number: int) -> Round | None:
        time.sleep(PAUSE)
        found = self.ask("round", number=number)
        if found is None:
            return None
        for seen, tokens in zip(self.texts, found["tokens"], strict=True):
            text = tuple(tokens)
            seen[text] = seen.get(text, 0) + 1
        first = [one for one in found["first"] if one is not None]
        later = [
            (end - start) / (request.new_tokens - 1)
            for start, end, request in zip(
                found["first"], found["ended"], self.workload.requests, strict=True
            )
            if start is not None and request.new_tokens > 1
        ]
        middle = median(first) if first else None
        return Round(found["seconds"], middle, median(later) if later else None)

    def ask(self, what: str, seconds: float | None = None, **given: Any) -> Any:
        """What the process answers; None where it has failed, now or before."""
        if self.error is not None or self.worker is None:
            return None
        most = min(self.seconds if seconds is None else seconds, self.left())
        try:
            return self.worker.ask(what, most, **given)
        except JackfieldError as error:
            self._failed(error)
            return None

    def _failed(self, error: JackfieldError) -> None:
        self.error = error
        said = f"refused: {error}" if isinstance(error, UsageError) else f"failed: {error}"
        self._with(reasons=(said,))

    def _with(self, **more: Any) -> None:
        self.row = replace(self.row, **more)
