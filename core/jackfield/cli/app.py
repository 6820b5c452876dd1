"""The commands, each in a file of its own, and the options that stand before a command."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jackfield.cli import bench, bench_page, bench_selections
from jackfield.cli.batch import batch
from jackfield.cli.chat import chat
from jackfield.cli.check import check
from jackfield.cli.doctor import doctor
from jackfield.cli.evaluate import evaluate
from jackfield.cli.explain import explain
from jackfield.cli.generate import generate
from jackfield.cli.lock import lock
from jackfield.cli.memory import memory
from jackfield.cli.new import new
from jackfield.cli.options import HelpOption, with_flags
from jackfield.cli.plugins import plugins
from jackfield.cli.serve import serve
from jackfield.cli.trace import trace
from jackfield.cli.tune import tune
from jackfield.cli.warm import warm
from jackfield.paths import check_here

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass
class Globals:
    """What the options before the command ask for."""

    debug: bool = False


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"jackfield {version('jackfield')}")
        raise typer.Exit


def _usage(command: Callable[..., None]) -> str | None:
    """Its docstring, which `python -OO` takes away, from its source."""
    if sys.flags.optimize < 2:
        return inspect.getdoc(command)
    (written,) = ast.parse(inspect.getsource(command)).body
    return ast.get_docstring(written) if isinstance(written, ast.FunctionDef) else None


def _globals(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and which backends were passed over.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
    usage: HelpOption = False,
) -> None:
    """Generate text with any transformers model and any plugged backend.

    Without --model, commands use the small model inside the package and need no network.
    """
    context.ensure_object(Globals).debug = debug
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
    check_here()


app.callback(invoke_without_command=True, add_help_option=False, help=_usage(_globals))(_globals)

COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "batch": batch,
    "eval": evaluate,
    "plugins": plugins,
    "explain": explain,
    "memory": memory,
    "trace": trace,
    "tune": tune,
    "doctor": doctor,
    "new": new,
    "check": check,
    "lock": lock,
    "warm": warm,
}
for name, command in COMMANDS.items():
    app.command(name, add_help_option=False, help=_usage(command))(with_flags(command))


class Benches(TyperGroup):
    """`jackfield bench …` is `jackfield bench run …`, where no other command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else ["run", *args])


BENCHES: dict[str, Callable[..., None]] = {
    "run": bench_selections.run,
    "compare": bench_selections.compare,
    "page": bench_page.page,
    "serve": bench.serve,
}
benches = typer.Typer(cls=Benches, rich_markup_mode=None)


def _benches() -> None:
    """Measure how fast selections of backends are, or a server."""


benches.callback(help=_usage(_benches))(_benches)
for name, command in BENCHES.items():
    benches.command(name, add_help_option=False, help=_usage(command))(with_flags(command))
app.add_typer(benches, name="bench")
