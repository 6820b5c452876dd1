"""What loading and generating take, measured in a process of its own.

On the CPU that is resident memory above what the process had before it loaded: its peaks are the
kernel's high-water mark, which can be set back on Linux only. On a GPU it is what torch allocated.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield import errors
from jackfield.engine.batch_limits import check_sizes
from jackfield.errors import ExecutionError, JackfieldError, UsageError
from jackfield.estimates.estimate import Estimate
from jackfield.estimates.estimating import estimate

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

#: glibc gives what is freed back at once, so that a peak is what was alive and not what was kept.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Measured:
    """What was measured, in bytes; peaks are None where this system does not tell them.

    `prompt_tokens` and `new_tokens` are those of each of `batch` requests.
    """

    weight_bytes: int
    cache_bytes: int | None
    loading_peak: int | None
    generating_peak: int | None
    prompt_tokens: int
    new_tokens: int
    batch: int


@dataclass(frozen=True)
class Check:
    """An estimate beside what was measured."""

    estimate: Estimate
    measured: Measured

    @property
    def cached_tokens(self) -> int:
        """Of each request at its end: the last new token is never fed."""
        return self.measured.prompt_tokens + self.measured.new_tokens - 1

    def rows(self) -> list[tuple[str, int | None, int | None]]:
        """(what, planned bytes, measured bytes)."""
        e, m = self.estimate, self.measured
        held = e.request_bytes(self.cached_tokens)
        totals = (
            e.total(m.prompt_tokens, m.batch),
            e.total(self.cached_tokens, m.batch, decoding=True),
        )
        planned = max(total for total in totals if total is not None) if all(totals) else None
        return [
            ("weights", e.weight_bytes if e.weights_known else None, m.weight_bytes),
            ("keys and values", None if held is None else held * m.batch, m.cache_bytes),
            ("peak while loading", e.loading_bytes, m.loading_peak),
            ("peak while generating", planned, m.generating_peak),
        ]

    def to_dict(self) -> dict[str, Any]:
        rows = {name: {"planned": p, "measured": m} for name, p, m in self.rows()}
        return {**asdict(self.measured), "rows": rows}


def check(
    model: str,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int = 16,
    batch: int = 1,
    **selections: Any,
) -> Check:
    """Load `model` in a process of its own, generate, and compare with the estimate.

    `prompt_tokens` None: 512, or what the context leaves. `selections` are those of
    `jackfield.load` as names. Raises the errors of `jackfield.load`, and
    UsageError where one is an object, which cannot be handed to another process.
    """
    check_sizes(prompt_tokens=prompt_tokens, new_tokens=new_tokens, batch=batch)
    if prompt_tokens is None:
        from jackfield.api import plan

        context = plan(model, **selections).requirements.context_length
        prompt_tokens = min(512, max(1, (context or 1024) - new_tokens))
    end = prompt_tokens + new_tokens - 1
    planned = estimate(model, lengths=sorted({prompt_tokens, end}), **selections)
    return Check(planned, measure(model, prompt_tokens, new_tokens, batch, **selections))


def measure(
    model: str, prompt_tokens: int, new_tokens: int, batch: int, **selections: Any
) -> Measured:
    """Load and generate in a fresh process. Raises the error that the process failed with."""
    asked = {"model": model, "tokens": [prompt_tokens, new_tokens, batch], "load": selections}
    try:
        sent = json.dumps(asked)
    except TypeError as error:
        raise UsageError(f"a process of its own can be given names only: {error}") from None
    done = subprocess.run(
        [sys.executable, "-m", "jackfield.estimates.measuring"],
        input=sent,
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ExecutionError(
            f"the process that measures ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        ) from None
    if "error" in found:
        raise getattr(errors, found["error"])(found["message"])
    return Measured(**found)


def _main() -> None:
    """Read what to measure from standard input, write what was measured as one line of JSON."""
    asked = json.loads(sys.stdin.read())
    try:
        prompt, new, batch = asked["tokens"]
        result = asdict(_measure(asked["model"], prompt, new, batch, asked["load"]))
    except JackfieldError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    print(f"\n{json.dumps(result)}", flush=True)  # noqa: T201 - what the other process reads


def _measure(model: str, prompt: int, new: int, batch: int, selections: dict[str, Any]) -> Measured:
    from jackfield.api import load, plan
    from jackfield.bridge.footprint import loaded_bytes

    planned = plan(model, **selections)
    _warm_up(selections)
    meter = Meter(planned.requirements.execution_devices or (planned.device or "cpu",))
    with load(model, max_batch_size=batch, **selections) as engine:
        _touch(engine)
        loading = meter.peak()
        held = _watch_cache(engine)
        size = int(engine.model.config.get_text_config(decoder=True).vocab_size)
        prompts = [_prompt(prompt, row, size) for row in range(batch)]
        meter.reset()
        engine.generate(prompts, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        generating = meter.peak()
        weights = loaded_bytes(engine.model, engine.plan["quantizer"].registered)
        return Measured(
            weights, held[0] if held else None, loading, generating,
            prompt, new, batch,
        )  # fmt: skip


def _prompt(tokens: int, row: int, vocab_size: int) -> list[int]:
    """Tokens that differ from row to row from the first on, so that no prompt is shared."""
    return [(7 * i + 13 * row + 5) % vocab_size for i in range(tokens)]


def _warm_up(selections: dict[str, Any]) -> None:
    """Let libraries take what they take once: threads, kernels, tables."""
    from jackfield.api import load

    kept = {k: v for k, v in selections.items() if k in ("dtype", "device_map")}
    with load("demo", **kept) as engine:
        engine.generate(["Hello"], max_new_tokens=4)


def _touch(engine: Engine) -> None:
    """Read all weights: of a mapped file, only what was read is resident."""
    for parameter in engine.model.parameters():
        if parameter.device.type == "cpu":
            parameter.detach().reshape(-1)[::512].sum()


def _watch_cache(engine: Engine) -> list[int]:
    """Gets what the cache holds when the first of its sequences leaves."""
    cache, seen = engine._loop.cache, []
    release = cache.release

    def noting(sequences: Sequence[Any]) -> None:
        if sequences and (held := cache.held_bytes()) is not None:
            seen.append(held)
        release(sequences)

    cache.release = noting  # type: ignore[method-assign]
    return seen


class Meter:
    """Peaks of memory above what was taken when it was made, in bytes.

    That of `devices`, where a model computes, if there are CUDA GPUs among them, each one's peak;
    otherwise that of the process.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._cuda = [device for device in devices if device.partition(":")[0] == "cuda"]
        self._base = 0
        gc.collect()
        _trim()
        self._base = self._now()
        self.reset()

    def _now(self) -> int:
        if self._cuda:
            import torch

            return sum(int(torch.cuda.memory_allocated(device)) for device in self._cuda)
        return _status("VmRSS")

    def reset(self) -> None:
        gc.collect()
        _trim()
        if self._cuda:
            import torch

            for device in self._cuda:
                torch.cuda.reset_peak_memory_stats(device)
        elif os.access(_CLEAR, os.W_OK):
            _CLEAR.write_text("5")

    def peak(self) -> int | None:
        if self._cuda:
            import torch

            peaks = (int(torch.cuda.max_memory_allocated(device)) for device in self._cuda)
            return sum(peaks) - self._base
        return _status("VmHWM") - self._base if os.access(_CLEAR, os.W_OK) else None


def _status(name: str) -> int:
    """A field of this process's status in bytes, 0 where there is none."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(s.split()[1]) * 1024 for s in lines if s.startswith(f"{name}:")), 0)


def _trim() -> None:
    """Have glibc give back what it kept; other systems' allocators do as they like."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    _main()
