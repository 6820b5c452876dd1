"""`jackfield bench serve`: how fast a server answers, measured from outside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.options import JsonOption, assignment, flag
from jackfield.cli.output import console, note, print_json, table
from jackfield.errors import UsageError

if TYPE_CHECKING:
    from jackfield.client.figures import Bounds, Figures
    from jackfield.client.load import Arrivals
    from jackfield.client.measuring import Target
    from jackfield.client.prompts import Prompts

MISSING = "measuring a server needs httpx and httptools; pip install jackfield[client]"


@dataclass(frozen=True)
class Loads:
    """What a server is put under."""

    concurrency: Annotated[
        str | None,
        flag("--concurrency", "N,N", "Closed loop: so many clients at a time; 1,8,32 without it."),
    ] = None
    rate: Annotated[
        str | None,
        flag("--rate", "R,R", "Open loop: so many requests a second, at random."),
    ] = None
    requests: Annotated[
        int | None, flag("--requests", "N", "How many; 4 a client, at least 32, without it.")
    ] = None
    duration: Annotated[
        float | None, flag("--duration", "SECONDS", "For how long requests are sent.")
    ] = None
    warm_up: Annotated[int, flag("--warm-up", "N", "Requests before each load.")] = 8
    seed: Annotated[int, flag("--seed", "N", "Of the prompts and the arrivals.")] = 0
    timeout: Annotated[float, flag("--timeout", "SECONDS", "For one request.")] = 600.0

    def arrivals(self) -> list[Arrivals]:
        """The loads, one after the other. Raises UsageError."""
        from jackfield.client.load import Arrivals

        if self.concurrency is not None and self.rate is not None:
            raise UsageError("--concurrency is a closed loop and --rate an open one; give one")
        for name in ("requests", "duration", "timeout"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise UsageError(f"--{name} must be above 0, not {value}")
        if self.warm_up < 0:
            raise UsageError(f"--warm-up must be at least 0, not {self.warm_up}")
        if self.rate is not None:
            rates = _numbers("--rate", self.rate, float)
            return [Arrivals(None, rate, self._most(8), self.duration, self.seed) for rate in rates]
        clients = _numbers("--concurrency", self.concurrency or "1,8,32", int)
        return [Arrivals(n, None, self._most(n), self.duration, self.seed) for n in clients]

    def _most(self, clients: int) -> int | None:
        if self.requests is None and self.duration is None:
            return max(32, 4 * clients)
        return self.requests


def _numbers(name: str, text: str, kind: Any) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"cannot read {name} {text!r}: write {name} 1,8,32") from None
    if not all(0 < value < float("inf") for value in found):
        raise UsageError(f"{name} {text!r}: each must be above 0")
    return found


class Endpoint(StrEnum):
    """Which endpoint is asked. An enum: typer 0.16 makes no option of a Literal."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True)
class Asked:
    """What each request asks for, and when it counts as good."""

    endpoint: Annotated[Endpoint, flag("--endpoint", "NAME", "chat or completions.")] = (
        Endpoint.CHAT
    )
    prompt_tokens: Annotated[
        int | None, flag("--prompt-tokens", "N", "Prompts of about so many tokens.")
    ] = None
    prompts: Annotated[
        Path | None,
        flag("--prompts", "FILE", "A prompt a line; beginnings of stories without it."),
    ] = None
    max_tokens: Annotated[int, flag("--max-tokens", "N", "How long an answer may be.")] = 64
    extra: Annotated[
        list[str] | None,
        flag("--set", "KEY=VALUE", "Another field of the request, as JSON; repeatable."),
    ] = None
    ttft_bound: Annotated[
        float | None, flag("--ttft-bound", "SECONDS", "Good: the first token came within this.")
    ] = None
    tpot_bound: Annotated[
        float | None, flag("--tpot-bound", "SECONDS", "Good: each later one took at most this.")
    ] = None

    def fields(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": 0} | dict(
            map(assignment, self.extra or ())
        )


def serve(
    loads: Loads,
    asked: Asked,
    url: Annotated[
        str, flag("--url", "URL", "The server.", "--base-url")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, flag("--model", "NAME", "One of the server's; its only one without it.", "-m")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="JACKFIELD_API_KEY", help="Its key."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure a server that speaks OpenAI's protocol: rates, and times of tokens, under load.

    Every answer is streamed, greedily. Times are those at which bytes came; the processor time of
    the client itself is measured beside them.

    Example: jackfield bench serve --url http://127.0.0.1:8000 --concurrency 1,8,32
    """
    try:
        from jackfield.client import measuring
        from jackfield.client.address import Address
        from jackfield.client.figures import Bounds
        from jackfield.client.talking import Talk
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error.name} is not here)") from None
    arrivals, bounds = loads.arrivals(), Bounds(asked.ttft_bound, asked.tpot_bound)
    address = Address.of(url, api_key)
    with address.client() as client:
        talk = Talk(address, model or address.only_model(client), asked.fields(), client)
        path = measuring.CHAT if asked.endpoint is Endpoint.CHAT else measuring.TEXT
        target = measuring.Target(talk, path)
        prompts = _prompts(asked, target, loads.seed)
        found = []
        for one in measuring.measure(
            target, prompts, arrivals, bounds, loads.warm_up, loads.timeout
        ):
            found.append(one)
            if not json:
                note(f"{_load(one)}: {one.requests} requests in {one.seconds:.1f} s")
    if json:
        print_json({**measuring.described(target), "loads": [one.to_dict() for one in found]})
    else:
        _print(found, bounds)


def _prompts(asked: Asked, target: Target, seed: int) -> Prompts:
    from jackfield.client import prompts

    if asked.prompt_tokens is not None and asked.prompt_tokens < 1:
        raise UsageError(f"--prompt-tokens must be above 0, not {asked.prompt_tokens}")
    if asked.prompts is not None and asked.prompt_tokens is not None:
        raise UsageError("--prompts and --prompt-tokens are two sorts of prompts; give one")
    if asked.prompts is not None:
        found: Prompts = prompts.of_file(asked.prompts)
    elif asked.prompt_tokens is not None:
        return prompts.words_for(asked.prompt_tokens, target.prompt_tokens, seed)
    else:
        found = prompts.Beginnings(seed)
    target.prompt_tokens(found(0))
    return found


def _load(one: Figures) -> str:
    return f"{one.rate:g}/s" if one.concurrency is None else str(one.concurrency)


def _ms(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return "/".join(_short(1000 * found[name]) for name in ("p50", "p95", "p99"))


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _print(found: list[Figures], bounds: Bounds) -> None:
    good = bounds != type(bounds)()
    out = console()
    rates = table("clients", "requests/s", *(["good/s"] if good else []), "tokens/s", "failed")
    times = table("clients", "first token", "per token", "longest gap", "whole", "client")
    for one in found:
        rates.add_row(
            _load(one), f"{one.requests_per_second:.4g}", *([f"{one.goodput:.4g}"] if good else []),
            f"{one.tokens_per_second:.4g}", _failed(one),
        )  # fmt: skip
        longest = "-" if one.gap is None else _short(1000 * one.gap["max"])
        times.add_row(
            _load(one), _ms(one.time_to_first_token), _ms(one.time_per_token), longest,
            _ms(one.whole), f"{one.client_share:.0%}",
        )  # fmt: skip
    out.print(rates)
    out.print("\nin ms, p50/p95/p99; client: of one processor core")
    out.print(times)
    _warn(found)


def _failed(one: Figures) -> str:
    said = ", ".join(f"{count} {kind}" for kind, count in one.errors.items())
    return f"{one.failed} ({said})" if said else "0"


def _warn(found: list[Figures]) -> None:
    """Say what makes figures mean less than they seem to."""
    if any(one.client_share > 0.8 for one in found):
        note("the client itself was busy all the time: it is measured as much as the server")
    if any(one.late > 0.05 for one in found):
        late = max(one.late for one in found)
        note(f"requests were sent up to {1000 * late:.0f} ms after they were due, which counts")
    if not all(one.counted for one in found):
        note("the server does not count tokens: pieces of text were counted in their place")
