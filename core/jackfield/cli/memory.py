"""`jackfield memory`: what a model takes, what fits, and how fast that can be. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.options import Backends, JsonOption, ModelArgument, flag
from jackfield.cli.output import console, note, print_json, table
from jackfield.errors import UsageError
from jackfield.units import in_units

if TYPE_CHECKING:
    from jackfield.estimates.backend_sizes import CacheBytes, WeightBytes
    from jackfield.estimates.estimate import Estimate
    from jackfield.estimates.measuring import Check


@dataclass(frozen=True)
class Device:
    """What is known of the device, and what is asked about it."""

    device_memory: Annotated[
        str | None, flag("--device-memory", "SIZE", "Such as 24GB; what is free now without it.")
    ] = None
    bandwidth: Annotated[
        str | None, flag("--bandwidth", "RATE", "Of the device's memory, such as 3.35TB/s.")
    ] = None
    measure_bandwidth: Annotated[
        bool, typer.Option("--measure-bandwidth", help="Measure it here, in about a second.")
    ] = False
    length: Annotated[
        list[int] | None, flag("--length", "N", "Tokens of a request; repeatable.")
    ] = None
    batch: Annotated[
        list[int] | None, flag("--batch", "N", "Requests that decode together; repeatable.")
    ] = None
    prefill_tokens: Annotated[
        int | None, flag("--prefill-tokens", "N", "Tokens of prompts that a step feeds at most.")
    ] = None
    replicas: Annotated[
        int, flag("--replicas", "N", "Engines side by side, each on its device or --tp devices.")
    ] = 1


def memory(
    backends: Backends,
    device: Device,
    model: ModelArgument = "demo",
    check: Annotated[
        bool, typer.Option("--check", help="Load it, generate, and compare with what was planned.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it, as .svg, .png or .pdf.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what a model takes of a device's memory, what fits, and how fast it can decode.

    Reads the model's config but no weights: weights by quantizer, keys and values by cache, the
    peaks of steps, the largest batch and the longest request. With a bandwidth also the limit of
    decoding. --check then loads the model in a process of its own and measures.

    --device h200 is the device of that data sheet, wherever it is; so are t4, a10, l4, l40s,
    rtx-4090, rtx-5090, a100-40gb, a100, h100, b200, mi300x and mi325x.

    Example: jackfield memory demo --tp 2 --replicas 4 --device h200
    """
    from jackfield.estimates.estimating import estimate

    _usable(backends, device, plot, check=check)
    found = estimate(
        model,
        device_memory=device.device_memory,
        bandwidth=_measured(model, backends) if device.measure_bandwidth else device.bandwidth,
        lengths=device.length,
        batch_sizes=device.batch or (1, 8, 32),
        prefill_tokens=device.prefill_tokens,
        replicas=device.replicas,
        **backends.arguments(),
    )
    checked = _check(model, backends) if check else None
    if plot is not None:
        from jackfield.estimates.plotting import plot_memory

        plot_memory(found, plot)
    if json:
        print_json(found.to_dict() | {"check": checked.to_dict() if checked else None})
        return
    _print(found)
    if checked is not None:
        _print_check(checked)
    if plot is not None:
        note(f"drawn in {plot}")


def _usable(backends: Backends, device: Device, plot: Path | None, *, check: bool) -> None:
    """Raise UsageError for what does not go together, before anything is read."""
    from jackfield.estimates.hardware import hardware

    if hardware(backends.device) and (check or device.measure_bandwidth):
        raise UsageError(
            f"--device {backends.device} is a data sheet, and --check and --measure-bandwidth "
            "measure this machine; drop one of them"
        )
    if plot is not None:
        from jackfield.estimates.plotting import check_plot

        check_plot(plot)
    if device.bandwidth is not None and device.measure_bandwidth:
        raise UsageError("--bandwidth and --measure-bandwidth say the same; give one of them")


def _measured(model: str, backends: Backends) -> float:
    from jackfield.api import plan
    from jackfield.bridge.bandwidth import measure_bandwidth

    where = plan(model, **backends.arguments()).placement
    assert where is not None
    return measure_bandwidth(where.device)


def _check(model: str, backends: Backends) -> Check:
    from jackfield.estimates.measuring import check

    return check(model, **backends.arguments())


def _print(found: Estimate) -> None:
    needs, memory, out = found.plan.requirements, found.memory(), console()
    out.print(f"{needs.architecture}, {needs.dtype} on {needs.device}, {needs.layout} layout")
    if needs.elsewhere:
        out.print(f"no {needs.device} is here: what backends need of a machine was not checked")
    weights = in_units(found.weight_bytes)
    if not found.weights_known:
        weights = f"at most {weights} (the quantizer does not say, so as if not quantized)"
    free = in_units(found.device_memory)
    whose = "given" if found.given else "free now"
    each = "" if needs.tp_size == 1 else f", for each of {needs.tp_size} processes"
    out.print(f"device memory {free} ({whose}), weights {weights}{each}")
    if memory is not None:
        longest = f"{memory.longest:,} tokens" if memory.grows else "any"
        out.print(f"longest request that fits: {longest}")
    if not found.steps:
        out.print("steps: unknown, since the model's code does not run without its weights")
    out.print()
    out.print(_weights(found))
    out.print()
    out.print(_caches(found))
    out.print()
    out.print(_lengths(found))
    if found.bandwidth is not None:
        out.print()
        out.print(_limits(found))
    if found.replicas > 1:
        devices = f"{found.replicas:,} replicas, {found.devices:,} devices"
        out.print(f"\n{devices}, {in_units(found.devices * found.device_memory)} of memory\n")
        out.print(_replicas(found))


def _weights(found: Estimate) -> Any:
    rows = table("quantizer", "dtype", "weights", "")
    for row in found.weights:
        size = "does not say" if row.num_bytes is None else in_units(row.num_bytes)
        rows.add_row(row.registered.name, row.dtype, size, *_why(row))
    by_size: dict[int, list[str]] = {}
    for dtype, size_of in found.dtypes.items():
        by_size.setdefault(size_of, []).append(dtype)
    for num_bytes, dtypes in by_size.items():
        rows.add_row("", ", ".join(dtypes), in_units(num_bytes), "not quantized")
    return rows


def _caches(found: Estimate) -> Any:
    lengths = found.lengths
    rows = table("cache", *(f"{n:,} tokens" for n in lengths), "")
    for row in found.caches:
        sizes = [in_units(row.request_bytes[n]) for n in lengths if n in row.request_bytes]
        sizes += ["does not say", *[""] * len(lengths)][: len(lengths) - len(sizes)]
        rows.add_row(row.registered.name, *sizes, *_why(row))
    return rows


def _why(row: WeightBytes | CacheBytes) -> list[Any]:
    from rich.text import Text

    if row.chosen:
        return [Text("chosen", style="green")]
    return [Text("; ".join(row.reasons), style="red")]


def _lengths(found: Estimate) -> Any:
    rows = _numbers("tokens", "prefill", "decode", "in all", "batch")
    memory, steps = found.memory(), {step.tokens: step for step in found.steps}
    for tokens in found.lengths:
        step, total = steps.get(tokens), found.total(tokens)
        rows.add_row(
            f"{tokens:,}",
            in_units(step.prefill) if step else "unknown",
            in_units(step.decode) if step else "unknown",
            "unknown" if total is None else in_units(total),
            "unknown" if memory is None else f"{memory.requests(tokens):,}",
        )
    return rows


def _limits(found: Estimate) -> Any:
    """How fast the device lets it be."""
    batches = [f"tokens/s ×{batch}" for batch in found.batch_sizes]
    rows = _numbers("tokens", *(["prompt"] if found.prompt else []), *batches)
    for tokens in found.lengths:
        cells = [f"{tokens:,}"]
        if found.prompt is not None:
            cells.append(_time(found.prompt_limit(tokens)))
        limits = [found.decode_limit(tokens, batch) for batch in found.batch_sizes]
        rows.add_row(*cells, *("unknown" if n is None else f"{n:,.1f}" for n in limits))
    return rows


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _numbers(*headings: str) -> Any:
    rows = table()
    for heading in headings:
        rows.add_column(heading, justify="right")
    rows.show_header = True
    return rows


def _replicas(found: Estimate) -> Any:
    """What all replicas hold together, and how fast they can be with as much as they hold."""
    rows = _numbers("tokens", "at once", "tokens/s", "prompts/s")
    for tokens, held, decode, prompts in found.together():
        limits = ["unknown" if limit is None else f"{limit:,.1f}" for limit in (decode, prompts)]
        rows.add_row(f"{tokens:,}", "unknown" if held is None else f"{held:,}", *limits)
    return rows


def _print_check(checked: Check) -> None:
    m, out = checked.measured, console()
    out.print()
    out.print(
        f"measured with {m.batch} request(s) of {m.prompt_tokens} prompt tokens and "
        f"{m.new_tokens} new ones"
    )
    rows = table("", "planned", "measured", "difference")
    for name, planned, measured in checked.rows():
        sizes = ["unknown" if size is None else f"{size:,}" for size in (planned, measured)]
        both = planned and measured is not None
        rows.add_row(name, *sizes, f"{(measured or 0) / planned - 1:+.1%}" if both else "")  # type: ignore[operator]
    out.print(rows)
