"""`jackfield bench`: how fast selections of backends are, beside one another."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.bench_table import print_comparison, print_table
from jackfield.cli.options import JsonOption, ModelOption, flag
from jackfield.cli.output import print_json, progress
from jackfield.errors import UsageError
from jackfield.spelling import AUTO

if TYPE_CHECKING:
    from jackfield.benchmarking.contenders import Contender
    from jackfield.benchmarking.results import Benchmark
    from jackfield.benchmarking.workload import Workload

BackendArgument = Annotated[
    str | None,
    typer.Argument(metavar="BACKEND", help="Measure plugin:NAME; --against says beside what."),
]


def _other(kind: str, *flags: str) -> Any:
    return typer.Option(*flags, metavar="NAME", help=f"Measure this {kind} backend; repeatable.")


@dataclass(frozen=True)
class Alternatives:
    """What is measured: every combination of what is given of each kind."""

    attention: Annotated[list[str] | None, _other("attention", "--attention")] = None
    cache: Annotated[list[str] | None, _other("cache", "--cache")] = None
    quantizer: Annotated[list[str] | None, _other("quantizer", "--quantization")] = None
    compiler: Annotated[list[str] | None, _other("compiler", "--compile")] = None
    decoding: Annotated[list[str] | None, _other("decoding", "--decoding")] = None
    scheduler: Annotated[list[str] | None, _other("scheduler", "--scheduler")] = None
    kernel: Annotated[list[str] | None, _other("kernel", "--kernel")] = None
    dtype: Annotated[
        list[str] | None, flag("--dtype", "DTYPE", "A dtype to measure in; repeatable.")
    ] = None
    tp_size: Annotated[
        list[int] | None,
        flag("--tp", "N", "So many processes that share the model; repeatable."),
    ] = None
    selections: Annotated[
        Path | None, flag("--selections", "FILE", "These instead: a list of objects, as JSON.")
    ] = None
    profile: Annotated[
        list[str] | None,
        flag("--profile", "FILE", "A row more: what `jackfield tune` found; repeatable."),
    ] = None
    against: Annotated[
        str | None, flag("--against", "NAME", "What BACKEND is compared with; auto without it.")
    ] = None
    rival: Annotated[
        list[str] | None,
        flag(
            "--rival", "NAME", "Another program: generate, generate_batch, llama.cpp; repeatable."
        ),
    ] = None
    assistant_model: Annotated[
        str | None, flag("--assistant-model", "MODEL", "Draft model for --decoding assisted.")
    ] = None
    device: Annotated[str, flag("--device", "DEVICE", "auto, or a device.")] = "auto"
    revision: Annotated[
        str | None, flag("--revision", "REV", "Branch, tag or commit of a hub model.")
    ] = None

    def contenders(self, model: str, backend: str | None) -> list[Contender]:
        """The rows, the one that others are compared with first. Raises UsageError."""
        from jackfield.benchmarking import contenders

        common: dict[str, Any] = {"model": model, "device_map": self.device}
        if self.assistant_model is not None:
            common["assistant_model"] = self.assistant_model
        if self.revision is not None:
            common["revision"] = self.revision
        given = {name: getattr(self, name) or [] for name in _KINDS}
        if backend is not None and _is_model(backend):
            raise UsageError(
                f"{backend} is a model, and the argument of bench is a backend: write --model "
                f"{backend}"
            )
        if backend is not None:
            kind, against = _kind_of(backend, self.against), self.against or AUTO
            if given[kind]:
                raise UsageError(f"{backend} and --{kind} are both {kind}; drop one of them")
            given[kind] = [against, backend]
        elif self.against is not None:
            raise UsageError(f"write jackfield bench plugin:NAME --against {self.against}")
        if self.selections is None:
            found = contenders.product(given, common)
        elif any(given.values()):
            raise UsageError("--selections FILE has all selections; drop those beside it")
        else:
            found = contenders.of_file(self.selections, common)
        dtype = {"dtype": given["dtype"][0]} if len(given["dtype"]) == 1 else {}
        found += [
            contenders.contender(name, {**common, **dtype, "profile": name})
            for name in self.profile or ()
        ]
        found += [contenders.rival(name, {**common, **dtype}) for name in self.rival or ()]
        contenders.check_labels(found)
        return found


def _is_model(name: str) -> bool:
    """Whether a model was named where a backend is due; a folder of a backend's name is none."""
    from jackfield.bridge.source import PACKAGED

    return name in PACKAGED or name.endswith(".gguf") or Path(name, "config.json").is_file()


_KINDS = (
    "attention", "cache", "quantizer", "compiler", "decoding", "scheduler", "kernel", "dtype",
    "tp_size",
)  # fmt: skip


def _kind_of(backend: str, against: str | None) -> str:
    """The kind that both are of. Raises SelectionError where there is no such backend."""
    from jackfield.testing.subject import subject_of

    kind = None if against is None else subject_of(against).kind
    return subject_of(backend, kind).kind


@dataclass(frozen=True)
class Asked:
    """What each round asks for."""

    workload: Annotated[
        str,
        flag("--workload", "NAME", "chat, summarize, code, maths, or a file: a request a line."),
    ] = "chat"
    requests: Annotated[int | None, flag("--requests", "N", "How many in a round.")] = None
    prompt_tokens: Annotated[int | None, flag("--prompt-tokens", "N", "Tokens of each prompt.")] = (
        None
    )
    new_tokens: Annotated[int | None, flag("--new-tokens", "N", "New ones of each.")] = None
    batch: Annotated[
        int | None, flag("--batch", "N", "How many run together at most; all without it.")
    ] = None
    rate: Annotated[
        float | None, flag("--rate", "R", "Requests a second, at random; all at once without it.")
    ] = None
    seed: Annotated[int, flag("--seed", "N", "Of the prompts and the arrivals.")] = 0

    def made(self, contender: Contender) -> Workload:
        """The requests, for the model of a contender. Raises UsageError."""
        from jackfield.benchmarking import prompt_files
        from jackfield.benchmarking.preparing import reader
        from jackfield.benchmarking.workload import PRESETS, Shape, preset

        shape = Shape(
            self.requests, self.prompt_tokens, self.new_tokens, self.batch, self.rate, self.seed
        )
        text, context = reader(contender)
        if self.workload not in PRESETS and os.path.exists(self.workload):
            return prompt_files.of_file(Path(self.workload), shape, text, context)
        return preset(self.workload, shape, text, context)


@dataclass(frozen=True)
class Measuring:
    """How it is measured, and what becomes of it."""

    rounds: Annotated[
        int | None, flag("--rounds", "N", "How often each is measured, in turn; 15 without it.")
    ] = None
    margin: Annotated[
        float, flag("--margin", "X", "By what share two may differ and count as the same.")
    ] = 0.05
    timeout: Annotated[float, flag("--timeout", "SECONDS", "For one round.")] = 600.0
    save: Annotated[
        Path | None, flag("--save", "FILE", "Write the run with every round, as JSON.")
    ] = None
    compare: Annotated[
        Path | None, flag("--compare", "FILE", "With a saved run; exit code 1 where it is slower.")
    ] = None
    html: Annotated[
        Path | None, flag("--html", "FILE", "Write one page with tables and plots.")
    ] = None

    def check(self) -> None:
        """Raise UsageError for what cannot be, before anything is measured."""
        from jackfield.benchmarking.saved import check_apart, check_file

        if not 0 < self.timeout < float("inf"):
            raise UsageError(f"--timeout must be above 0 seconds, not {self.timeout:g}")
        for name in ("save", "html"):
            if (path := getattr(self, name)) is not None:
                check_file(path, f"--{name}")
        check_apart({"--save": self.save, "--html": self.html})


def run(
    alternatives: Alternatives,
    asked: Asked,
    measuring: Measuring,
    backend: BackendArgument = None,
    model: ModelOption = "demo",
    json: JsonOption = False,
) -> None:
    """Measure how fast selections of backends are, beside one another.

    Each runs in a process of its own, in turn, greedily; the first is what the others are compared
    with. A row whose tokens are not the model's, or that did not run what was asked for, is
    invalid. `jackfield bench serve` measures a server.

    Example: jackfield bench --attention sdpa --attention cpu_decode --rival generate
    """
    from jackfield.benchmarking import saved
    from jackfield.benchmarking.running import ROUNDS, bench

    measuring.check()
    before = None if measuring.compare is None else saved.read(measuring.compare)
    rows = alternatives.contenders(model, backend)
    workload = asked.made(rows[0])
    if before is not None:
        saved.check_workload(before, workload.to_dict())
    with progress("rounds") as moved:
        found = bench(
            rows,
            workload,
            rounds=ROUNDS if measuring.rounds is None else measuring.rounds,
            margin=measuring.margin,
            seconds=measuring.timeout,
            progress=moved,
        )
    if measuring.save is not None:
        saved.save(found, measuring.save)
    _show(found, before, measuring.html, json)


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A run that was saved.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="A later one.")],
    html: Annotated[
        Path | None, flag("--html", "FILE", "Write one page with tables and plots.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare two saved runs, without measuring anything.

    The exit code is 1 where a row is slower for certain, or no result any more.

    Example: jackfield bench compare monday.json today.json
    """
    from jackfield.benchmarking import saved

    if html is not None:
        saved.check_file(html, "--html")
    _show(saved.read(after), saved.read(before), html, json)


def _show(found: Benchmark, before: Benchmark | None, html: Path | None, json: bool) -> None:
    """Show a run, and beside a saved one; end with exit code 1 where it is worse, or no result."""
    from jackfield.benchmarking import saved

    comparison = None if before is None else saved.compare(before, found)
    if html is not None:
        from jackfield.benchmarking.page import html as page

        saved.write(html, page(found, comparison))
    if json:
        print_json(found.to_dict() | {"comparison": comparison.to_dict() if comparison else None})
    else:
        print_table(found)
        if comparison is not None:
            print_comparison(comparison)
    if not any(row.valid for row in found.rows) or (comparison and comparison.failed):
        raise typer.Exit(1)
