"""`jackfield new`: writes the package of a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jackfield.cli.options import JsonOption
from jackfield.cli.output import print_json


def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="attention, cache, compiler, decoding, kernel, quantizer or scheduler.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="What it is selected by.", show_default=False),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A new or empty one; jackfield-NAME without it."),
    ] = None,
    triton: Annotated[
        bool,
        typer.Option("--triton", help="Of attention and kernel: in Triton, beside a reference."),
    ] = False,
    layout: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="Of a cache: packed or padded.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the package of a new backend: module, tests, benchmark, CI file.

    What is written is whole: it installs, runs and passes its checks. Change it from there. Needs
    no network, and 'jackfield[new]'.

    Example: jackfield new attention my-kernel
    """
    from jackfield.authoring import write_package

    made = write_package(kind, name, folder, triton=triton, layout=layout)
    if json:
        told = {"distribution": made.distribution, "module": made.module}
        print_json({**told, "folder": str(made.folder), "files": [str(f) for f in made.files]})
        return
    for file in made.files:
        print(made.folder / file)
    print(f"next: cd {made.folder} && pip install -e . && jackfield check plugin:{name}")
