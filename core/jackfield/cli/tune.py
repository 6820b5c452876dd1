"""`jackfield tune`: measures what is installed, and writes the fastest selection as a profile."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.bench_selections import Asked
from jackfield.cli.files import decoded, read_file
from jackfield.cli.options import Backends, JsonOption, ModelArgument, flag
from jackfield.cli.output import console, note, print_json, table
from jackfield.errors import UsageError, shown
from jackfield.units import in_units

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text
    from jackfield.tuning.tuning import Terms

#: The exit code after Ctrl-C, as a shell has it.
INTERRUPTED = 130


@dataclass(frozen=True)
class Bounded:
    """How long it takes, what a selection may lose, and what is written."""

    output: Annotated[Path, flag("--output", "FILE", "Where the profile is written.", "-o")] = Path(
        "profile.toml"
    )
    budget: Annotated[str, flag("--budget", "TIME", "About how long it may take: 90s, 2m, 1h.")] = (
        "2m"
    )
    quantize: Annotated[
        bool, typer.Option("--quantize", help="Try quantized weights, and caches that round.")
    ] = False
    text: Annotated[
        Path | None, flag("--text", "FILE", "Its perplexity is held; a text inside without it.")
    ] = None
    quality: Annotated[
        Path | None, flag("--quality", "FILE", "Questions with right answers: an object a line.")
    ] = None
    max_rise: Annotated[
        float, flag("--max-rise", "X", "By what share perplexity may rise beside auto.")
    ] = 0.02
    max_drop: Annotated[
        float, flag("--max-drop", "X", "What share of the answers may be lost beside auto.")
    ] = 0.02
    html: Annotated[
        Path | None, flag("--html", "FILE", "Write one page with a table and plots.")
    ] = None

    def check(self) -> None:
        """Raise UsageError where nothing can be written, before anything is measured."""
        from jackfield.benchmarking.saved import check_apart, check_file

        files = {"--output": self.output, "--html": self.html}
        for name, path in files.items():
            if path is not None:
                check_file(path, name)
        check_apart(files)

    def terms(self, reader: Text, context: int | None) -> Terms:
        """What quality is held by. Raises UsageError for what the model cannot be asked."""
        from jackfield.tuning.bounds import Bounds
        from jackfield.tuning.expected import read_answers
        from jackfield.tuning.tuning import Terms

        text = None if self.text is None else decoded(read_file(self.text), str(self.text))
        answers = () if self.quality is None else read_answers(self.quality, reader, context)
        return Terms(Bounds(self.max_rise, self.max_drop), text, answers, self.quantize)


def tune(
    backends: Backends,
    asked: Asked,
    bounded: Bounded,
    model: ModelArgument = "demo",
    json: JsonOption = False,
) -> None:
    """Measure what is installed, rung by rung, and write the fastest selection as a profile.

    What is named by a flag is kept, and the rest is tried: device, dtype, attention, cache,
    compiler, sizes of the batch, with --quantize also quantizers. Never slower than auto: what is
    not faster for certain is not taken. After Ctrl-C the best so far is written.

    Example: jackfield tune demo --workload chat --output profile.toml
    """
    from jackfield.tuning.bounds import Budget, parse_seconds

    budget = Budget(parse_seconds(bounded.budget))  # of which imports are a part
    from jackfield.benchmarking.contenders import Contender
    from jackfield.benchmarking.preparing import reader
    from jackfield.benchmarking.saved import write
    from jackfield.planning.toml_text import toml
    from jackfield.tuning.tuning import tune as climb
    from jackfield.tuning.writing import HEAD, profile_of

    bounded.check()
    fixed = _fixed(backends, asked)
    contender = Contender(model, {"model": model, **fixed})
    workload = asked.made(contender)
    read, context = reader(contender)
    terms = bounded.terms(read, context)
    with _stopped_once():
        outcome = climb(model, fixed, workload, terms, budget, read, note)
        found = profile_of(model, outcome, workload, budget.seconds)
        if json:
            print_json(found)
        else:
            _print(found)
        text = toml(found, HEAD)
        try:
            write(bounded.output, text)
        except UsageError:
            if not json:
                print(text)  # it took its time to be found
            raise
        note(f"{bounded.output}: {_selected(found['selections'])}")
        if bounded.html is not None:
            from jackfield.tuning.page import html

            write(bounded.html, html(found))
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def _stopped_once() -> Iterator[None]:
    """Ctrl-C ends a climb, whose result is then written; a second one would lose it."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _fixed(backends: Backends, asked: Asked) -> dict[str, Any]:
    """What is named by flags, which is not tuned. Raises UsageError."""
    from jackfield.planning.keywords import in_our_words
    from jackfield.requests.arguments import OF_LOADING
    from jackfield.spelling import AUTO

    given = in_our_words(backends.arguments(), OF_LOADING, "jackfield tune")
    for name in ("profile", "locked"):
        if name in given:
            raise UsageError(f"tune takes no --{name}, which says what to run; drop it")
    if asked.batch is not None:
        given["max_batch_size"] = asked.batch
    return {name: value for name, value in given.items() if value is not False and value != AUTO}


def _selected(selections: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in selections.items())


def _print(found: Mapping[str, Any]) -> None:
    """What was tried; what was refused before it was measured is in the profile alone."""
    rows = table("tried")
    unit = "request" if found["made"]["workload"]["arrivals"] else "round"
    for heading in ("tokens/s", unit, "time", "peak", "perplexity"):
        rows.add_column(heading, justify="right")
    rows.add_column("", overflow="fold")
    for one in found["evidence"]:
        if one["rounds"]:
            rows.add_row(
                one["label"] if one["rung"] == "auto" else f"{one['rung']} {one['label']}",
                _number(one["tokens_per_second"]), f"{one['seconds']:.3g} s",
                "1" if one["rung"] == "auto" else _number(one["ratio"]),
                "-" if one["peak_bytes"] is None else in_units(one["peak_bytes"]),
                _number(one["perplexity"]), one["verdict"],
            )  # fmt: skip
    if (last := found["made"]["beside_auto"]) is not None:
        sure = "" if last["low"] is None else f"{last['low']:.2f} to {last['high']:.2f} in "
        said = f"{sure}{last['rounds']} rounds: {last['verdict']}"
        rows.add_row("the best beside auto", "", "", _number(last["ratio"]), "", "", said)
    console().print(rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
