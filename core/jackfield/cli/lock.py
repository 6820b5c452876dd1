"""`jackfield lock`: writes down which backends, kernels and libraries run a model."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer

from jackfield.cli.options import Backends, JsonOption, ModelArgument
from jackfield.cli.output import print_json, say
from jackfield.errors import UsageError, shown

DEFAULT = Path("jackfield.lock.json")


def lock(
    backends: Backends,
    model: ModelArgument = "demo",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the lock is written.")
    ] = DEFAULT,
    json: JsonOption = False,
) -> None:
    """Write a lock: backends with options and files, kernels by content, versions of libraries.

    `--locked FILE`, or `jackfield.load(..., locked=FILE)`, then runs these and refuses anything
    else. Loads no weights.

    Example: jackfield lock --attention sdpa -o serving.lock.json
    """
    from jackfield.api import plan
    from jackfield.planning.locking import lock_of

    found = lock_of(plan(model, **backends.arguments()))
    text = json_.dumps(found, indent=2, default=str) + "\n"
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the lock cannot be written to {shown(output)}: {error.strerror}"
        ) from None
    if json:
        print_json(found)
    else:
        say(f"{output}: {len(found['backends'])} backends, {len(found['libraries'])} libraries")
