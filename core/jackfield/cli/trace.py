"""`jackfield trace`: where the time of requests goes, as a table, for Perfetto, or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.options import (
    Backends,
    Batches,
    JsonOption,
    ModelArgument,
    Settings,
    flag,
    load,
)
from jackfield.cli.output import note, print_json
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

PROMPT = "Once upon a time"
#: Keeps what was computed before the trace from being found in the cache within it.
APART = "jackfield trace: before it"


def trace(
    backends: Backends,
    settings: Settings,
    batches: Batches,
    model: ModelArgument = "demo",
    prompt: Annotated[
        list[str] | None, flag("--prompt", "TEXT", "A request; repeatable: they run together.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user's message to a chat model.")
    ] = False,
    output: Annotated[
        list[Path] | None,
        flag("--output", "FILE", "Write it, too: .json for Perfetto, .svg, .html.", "-o"),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Trace the first steps of all; run none before.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show where the time of requests goes: queue, prefill, and each kind of work in a step.

    The prompts are answered twice, and the second time is traced: what happens once only, such as
    compiling, is not in it, unless with --cold. The texts themselves are not shown.

    Example: jackfield trace --prompt "Once upon a time" --max-new-tokens 64 -o trace.json
    """
    from jackfield.tracing.trace import check_file

    for file in output or ():
        check_file(file)
    texts = prompt or [PROMPT]
    asked: list[Any] = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    with load(model, backends, batches) as engine:
        if not cold:
            _run(engine, asked, settings.to_dict() | {"cache_salt": APART})
        with engine.trace() as found:
            _run(engine, asked, settings.to_dict())
        plan = engine.plan.to_dict()
    for file in output or ():
        found.save(file)
    if json:
        print_json(found.to_dict() | {"plan": plan})
        return
    print(found)
    for file in output or ():
        note(f"written to {file}" + (_PERFETTO if file.suffix == ".json" else ""))


_PERFETTO = "; open it at https://ui.perfetto.dev"


def _run(engine: Engine, prompts: list[Any], settings: dict[str, Any]) -> None:
    """Answer all of them. Raises ExecutionError where one fails."""
    for completion in engine.generate(prompts, **settings):
        if completion.error is not None:
            raise ExecutionError(completion.error)
