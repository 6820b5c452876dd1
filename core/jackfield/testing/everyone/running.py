"""Checks in engines: cancelled, failing, closed, two at once, again and again."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jackfield.engine.engine import Engine
from jackfield.errors import JackfieldError, PlanError
from jackfield.testing import engines
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.everyone.surroundings import kept
from jackfield.testing.memory import growth
from jackfield.testing.models import build
from jackfield.testing.subject import Subject

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [21, 22] * 5)
COUNT = 8
LONG = 150
MOST_KEPT = 2000  # bytes of a request that has ended
ROUNDS = 5  # of all prompts in a call that is measured: more than 64 requests in a window of these
PATIENCE = 30.0  # seconds that a close may take


def checks(subject: Subject) -> Iterator[Check]:
    """Each beside what the same engine says when nothing goes wrong."""
    for name, run in {
        "prints": _prints, "cancel": _cancel, "failure": _failure, "close": _close,
        "two_engines": _two_engines, "memory": _memory,
    }.items():  # fmt: skip
        once = partial(run, subject)
        yield Check(f"running.{name}", "contract", once, limit=180, large=name == "memory")


@contextlib.contextmanager
def engine_of(subject: Subject, seed: int = 0) -> Iterator[tuple[Engine, Any]]:
    """An engine of a model of its own, and that model. NotTriedError: it does not run plainly."""
    model = build("grouped_query", seed=subject.seed + seed)
    source, more = _source(subject, model)
    try:
        opened = engines.engine_of(subject, source, **more)
        engine = opened.__enter__()
    except PlanError as error:
        raise NotTriedError(f"does not run the small model: {error}") from None
    try:
        yield engine, model
    finally:
        opened.__exit__(None, None, None)


def _source(subject: Subject, model: Any) -> tuple[Any, dict[str, Any]]:
    """The model, live, or in a folder for a quantizer; and the draft model that is asked for."""
    if subject.kind == "quantizer":
        folder = Path(tempfile.mkdtemp(dir=subject.folder))
        model.save_pretrained(folder)
        return str(folder), {}
    if subject.wants_draft_model:
        return model, {"assistant_model": build("grouped_query", seed=subject.seed + 7)}
    return model, {}


def _texts(engine: Engine, prompts: Any = PROMPTS) -> list[list[int]]:
    found = engine.generate([*prompts], max_new_tokens=COUNT)
    for one in found:
        if one.error is not None:
            raise WrongError(f"a plain request ended by an error: {one.error}")
    return [one.token_ids for one in found]


def _same(now: list[list[int]], before: list[list[int]], when: str) -> None:
    for number, (one, other) in enumerate(zip(now, before, strict=True)):
        if one != other:
            raise WrongError(f"request {number} says {one} {when}, and said {other} before")


def _prints(subject: Subject, _: object) -> None:
    """Nothing belongs on the user's standard output; and nothing of the process is changed."""
    said: list[str] = []
    with _output(said), kept("running it"), engine_of(subject) as (engine, _):
        _texts(engine)
        _texts(engine)
    if text := "".join(said).strip():
        raise WrongError(f"prints while it runs: {text[:120]!r}")


@contextlib.contextmanager
def _output(said: list[str]) -> Iterator[None]:
    """`said` gets what is written to standard output meanwhile, from Python and past it."""
    written = io.StringIO()
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(written):
                yield
        finally:
            os.dup2(own, 1)
            os.close(own)
            file.seek(0)
            said += [written.getvalue(), file.read().decode(errors="replace")]


def _cancel(subject: Subject, _: object) -> None:
    """One of three is cancelled in its middle, one at once: the others do not notice."""
    with engine_of(subject) as (engine, _):
        before = _texts(engine)
        stream = engine.stream(PROMPTS[2], max_new_tokens=LONG)
        next(stream)
        others = [engine.submit(prompt, max_new_tokens=COUNT) for prompt in PROMPTS[:2]]
        dropped = engine.submit(PROMPTS[2], max_new_tokens=LONG)
        engine.cancel(dropped)
        stream.close()  # type: ignore[attr-defined]
        found = [other.result().token_ids for other in others]
        _same(found, before[:2], "beside requests that are cancelled")
        _same(_texts(engine), before, "after requests were cancelled")


def _failure(subject: Subject, _: object) -> None:
    """A step fails in the middle of a forward call: what is open fails, what comes later runs."""
    with engine_of(subject) as (engine, _):
        before = _texts(engine)
        bound = engine._assembly.bound
        layer = next(m for m in bound.model.modules() if type(m).__name__.endswith("DecoderLayer"))
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("a failure that the check makes")

        handle = layer.register_forward_pre_hook(fail)
        try:
            with contextlib.suppress(JackfieldError):
                engine.generate([*PROMPTS[1:]], max_new_tokens=LONG)
        finally:
            handle.remove()
        if len(calls) < 4:
            raise NotTriedError("its steps do not call the model's modules")
        _same(_texts(engine), before, "after a step has failed")


def _close(subject: Subject, _: object) -> None:
    """An engine is closed in the middle of a request; its model can be used by the next."""
    threads = set(threading.enumerate())
    with engine_of(subject) as (engine, _):
        before = _texts(engine)
        stream = engine.stream(PROMPTS[0], max_new_tokens=LONG)
        next(stream)
        begin = time.perf_counter()
        engine.close()
        took = time.perf_counter() - begin
        if took > PATIENCE:
            raise WrongError(f"an engine takes {took:.0f} s to close in the middle of a request")
        with contextlib.suppress(JackfieldError):
            for _ in stream:
                pass
        engine.close()
    with engine_of(subject) as (engine, _):
        _same(_texts(engine), before, "in a new engine, after one was closed")
    left = [t.name for t in threading.enumerate() if t not in threads and not t.daemon]
    if left:
        raise WrongError(f"leaves threads that hold the process: {', '.join(left)}")


def _two_engines(subject: Subject, _: object) -> None:
    """Two engines of two models at once, each in a thread, say what each says alone."""
    alone = []
    for seed in (0, 1):
        with engine_of(subject, seed) as (engine, _):
            alone.append(_texts(engine))
    wrong: list[str] = []

    def talk(number: int, engine: Engine) -> None:
        try:
            for _ in range(4):
                _same(_texts(engine), alone[number], "beside another engine")
        except (WrongError, JackfieldError) as error:
            wrong.append(str(error))

    with engine_of(subject, 0) as (one, _), engine_of(subject, 1) as (other, _):
        threads = [
            threading.Thread(target=talk, args=(number, engine), daemon=True)
            for number, engine in enumerate((one, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    interpreters = any(mark in why for why in wrong for mark in ("@triton.jit", "InterpreterError"))
    if interpreters and os.environ.get("TRITON_INTERPRET"):
        raise NotTriedError("Triton's interpreter serves one thread at a time")
    if wrong:
        raise WrongError(wrong[0])


def _memory(subject: Subject, _: object) -> str:
    """The same requests again and again: neither Python's memory nor tensors grow with them."""
    with engine_of(subject) as (engine, _):
        for _ in range(3):
            _texts(engine)
        before, asked = _tensors(), 0

        def requests() -> None:
            nonlocal asked
            for _ in range(ROUNDS):
                asked += len(_texts(engine))

        count = ROUNDS * len(PROMPTS)
        each = growth(requests, MOST_KEPT * count) / count
        more = (_tensors() - before) / asked
    if each > MOST_KEPT:
        raise WrongError(f"{each:.0f} bytes of memory stay of each request that has ended")
    if more >= 1:
        raise WrongError(f"{more:.1f} tensors stay of each request that has ended")
    return f"{max(0.0, each):.0f} bytes a request stay"


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
