"""`jackfield serve`: OpenAI's protocol over the models that are named."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.on_ray import WITHOUT_REPLICAS, RayAddressOption, ReplicasOption
from jackfield.cli.options import Answers, Backends, Batches, flag
from jackfield.cli.output import say
from jackfield.errors import UsageError

if TYPE_CHECKING:
    from jackfield.serving.settings import ServerSettings

MISSING = "serving needs FastAPI and uvicorn; pip install jackfield[serve]"


@dataclass(frozen=True)
class Serving:
    """Where a server listens, and whom it answers; what is not given stands in --config or the
    environment.
    """

    host: Annotated[str | None, flag("--host", "HOST", "The address; 127.0.0.1 without it.")] = None
    port: Annotated[int | None, flag("--port", "PORT", "8000 without it; 0: any that is free.")] = (
        None
    )
    allow_unauthenticated: Annotated[
        bool | None,
        typer.Option(
            "--allow-unauthenticated", help="Serve others than this machine without an API key."
        ),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        flag("--cors-origin", "ORIGIN", "A site whose pages may ask; repeatable."),
    ] = None
    ssl_certfile: Annotated[
        Path | None, flag("--ssl-certfile", "FILE", "A certificate, for TLS.")
    ] = None
    ssl_keyfile: Annotated[Path | None, flag("--ssl-keyfile", "FILE", "Its key.")] = None
    max_waiting: Annotated[
        int | None, flag("--max-waiting", "N", "Requests that wait for a model; then 429.")
    ] = None
    deadline: Annotated[
        float | None, flag("--deadline", "SECONDS", "When a request ends, whatever it has.")
    ] = None
    model_timeout: Annotated[
        float | None,
        flag("--model-timeout", "SECONDS", "When one of several models is unloaded that idles."),
    ] = None
    log_texts: Annotated[
        bool | None, typer.Option("--log-texts", help="Write prompts and answers into the log.")
    ] = None

    def given(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, [])}


def serve(
    backends: Backends,
    batches: Batches,
    serving: Serving,
    answers: Answers,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A hub id, a folder, a GGUF file, or demo.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings and models, as TOML.")
    ] = None,
    new_key: Annotated[
        str | None,
        typer.Option("--new-key", metavar="NAME", help="Print an API key and its hash, and end."),
    ] = None,
    replicas: ReplicasOption = None,
    ray_address: RayAddressOption = None,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Always on.")
    ] = True,
) -> None:
    """Serve models by OpenAI's protocol: chat, completions, responses, and a page to try them.

    The model is the argument, or those of the file in --config; without either the small model
    inside the package. One plan is printed for each, then where it is served.

    Example: jackfield serve demo --port 8000
    """
    try:
        from jackfield.serving import keys, running
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error.name} is not here)") from None
    if new_key is not None:
        _print_key(new_key, *keys.new_key())
        return
    given = {**serving.given(), **answers.given()}
    found = _settings(model, backends, batches, given, config)
    if replicas is None and ray_address is not None:
        raise UsageError(WITHOUT_REPLICAS)
    with _logged():
        if replicas is None:
            running.serve(found, _say)
        else:
            _serve_replicas(found, replicas, ray_address)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _serve_replicas(settings: ServerSettings, replicas: str, address: str | None) -> None:
    from jackfield.replicas import running
    from jackfield.replicas.cluster import Count

    running.serve(settings, Count.of(replicas), address, _say)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Lines of the server's log on standard error as they are: those of requests are JSON."""
    log, handler = logging.getLogger("jackfield.serving"), logging.StreamHandler()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def _settings(
    model: str | None,
    backends: Backends,
    batches: Batches,
    given: dict[str, Any],
    config: Path | None,
) -> ServerSettings:
    from jackfield.serving.settings import name_of, settings

    arguments = {**backends.arguments(), **batches.arguments()}
    defaults = {**Backends().arguments(), **Batches().arguments()}
    own = {name: value for name, value in arguments.items() if value != defaults[name]}
    if model is not None or (own and config is None):
        name = model or "demo"
        given["models"] = {name_of(name): {"model": name, **own}}
    elif own:
        raise UsageError(
            f"{', '.join(sorted(own))} of which model? Write it into {config}, or name one MODEL"
        )
    return settings(config, **given)


def _print_key(name: str, key: str, digest: str) -> None:
    if not name or any(character.isspace() for character in name):
        raise UsageError(f"--new-key {name!r}: the name of a key has no spaces")
    print(key, flush=True)
    say("the key is shown once, on standard output; write into the file of --config:")
    say(f"[keys.{json.dumps(name, ensure_ascii=False)}]")
    say(f'sha256 = "{digest}"')
