"""`jackfield warm`: what steps of a model are compiled to, on disk before anybody waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from jackfield.cli.options import Backends, Batches, JsonOption, ModelArgument, load
from jackfield.cli.output import print_json, say
from jackfield.contracts import Compiler
from jackfield.errors import UsageError

RowsOption = Annotated[
    int,
    typer.Option(
        "--rows",
        metavar="N",
        min=1,
        help="For steps of up to so many sequences, or tokens of short prompts.",
    ),
]


def warm(
    backends: Backends,
    model: ModelArgument = "demo",
    rows: RowsOption = 128,
    json: JsonOption = False,
) -> None:
    """Make graphs of the decode steps of a model, for every size up to --rows, and keep them.

    Engines of other processes then have them at once, and `auto` takes the compiler `native` for
    this model on this machine. Steps of so many tokens that read prompts use the same graphs.
    Steps with drafts are traced when they first come.

    Example: jackfield warm Qwen/Qwen2.5-0.5B --dtype bfloat16 --rows 128
    """
    named = replace(backends, compiler=backends.compiler or ["native"])
    with load(model, named, Batches(max_batch_size=rows)) as engine:
        if not (sizes := engine.compile_ahead()):
            name = engine.plan["compiler"].registered.name
            raise UsageError(
                f"compile={name!r} keeps nothing on disk before a step comes; name 'native', "
                "or no compiler"
            )
        ran = engine.report()["compiler"]
        if ran.compiled is not None and ran.compiled.kept < ran.compiled.graphs:
            raise UsageError(
                f"graphs of {model} cannot be kept for other processes: something in it has no "
                "form on disk (a hook, an odd attribute, a constant), or a warning above says what"
            )
        compiler = engine.plan["compiler"].registered.backend
        assert isinstance(compiler, Compiler)
        compiler.warmed(engine.plan.requirements)
    seconds = ran.compiled.seconds if ran.compiled is not None else 0.0
    found = {"model": model, "compiler": ran.name, "rows": sizes, "seconds": round(seconds, 3)}
    if json:
        print_json(found)
    else:
        counts = ", ".join(map(str, sizes))
        say(f"{model}: steps of {counts} sequences are on disk for {ran.name} ({seconds:.1f} s)")
