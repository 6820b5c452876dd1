"""Workers that are no processes, and distributions that lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from jackfield.benchmarking import judging, operators, roofline, running
from jackfield.benchmarking.child import Child
from jackfield.benchmarking.worker import _error


class Here:
    """A worker in this process, which is told and answers what goes over the socket otherwise."""

    def __init__(self) -> None:
        self._child: Child | None = Child()

    def ask(self, what: str, seconds: float = 0.0, **given: Any) -> Any:
        del seconds
        assert self._child is not None
        sent = json.loads(json.dumps({"do": what, **given}))
        answer = json.loads(json.dumps(self._child.answer(sent)))
        if "error" in answer:
            raise _error(answer)
        return answer["found"]

    def close(self) -> None:
        if self._child is not None and (engine := getattr(self._child._program, "_engine", None)):
            engine.close()
        self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: What the fixture `here` takes away, for tests of it.
CALLED, LIMITS = operators.called, roofline.limits


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started, and nobody asks what a device can do, or which operators are called."""
    monkeypatch.setattr(running, "Worker", Here)
    monkeypatch.setattr(judging, "Worker", Here)
    monkeypatch.setattr(running, "PAUSE", 0.0)
    # a process for each liar would take long; test_processes has those
    monkeypatch.setattr("jackfield.registry.loading.tried", lambda *_: None)
    monkeypatch.setattr("jackfield.benchmarking.roofline.limits", lambda *_, **__: None)
    monkeypatch.setattr("jackfield.benchmarking.operators.called", lambda run: None)
    monkeypatch.setattr("jackfield.benchmarking.child.gc.collect", lambda: None)


@pytest.fixture
def with_operators(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are counted all the same."""
    monkeypatch.setattr(operators, "called", CALLED)


@pytest.fixture
def with_limits(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are told all the same, of a device that reads and multiplies as fast as this."""
    monkeypatch.setattr(roofline, "limits", LIMITS)
    monkeypatch.setattr("jackfield.bridge.bandwidth.measure_bandwidth", lambda device: 4e10)
    monkeypatch.setattr("jackfield.bridge.bandwidth.measure_flops", lambda device, dtype: 2e11)


LIAR = """
from dataclasses import replace
from jackfield import hookimpl
from jackfield.contracts import Attention, AttentionCapabilities
from jackfield.registry.discovery import registry
from jackfield.spelling import parse

def changed(bound):
    return bound
# more

class Liar(Attention):
    name = 'NAME'
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}), features=frozenset({"grouped_query"})
    )
    def bind(self, context):
        sdpa = registry().find("attention", parse("jackfield/sdpa")).backend
        return changed(sdpa.bind(replace(context, options=sdpa.options())))

@hookimpl
def jackfield_attention():
    return [Liar()]
"""

#: Each says that it is an attention of its own.
LIARS = {
    "inside": "",
    "wrong": """
calls = 0
def changed(bound):
    def forward(*args, **kwargs):
        global calls
        calls += 1
        output, weights = bound.forward(*args, **kwargs)
        return (output if calls < 100 else output.flip(-1)), weights
    return replace(bound, forward=forward)
""",
    "early": """
def changed(bound):
    from jackfield.engine.sequences import RunningSequence
    whole = RunningSequence._finishes
    def finishes(self, token):
        self.finish_reason = "length" if self.num_new >= 3 else self.finish_reason
        return whole(self, token) or self.num_new >= 3
    RunningSequence._finishes = finishes
    return bound
""",
    "crash": """
import os
def changed(bound):
    return replace(bound, forward=lambda *args, **kwargs: os._exit(7))
""",
    "hang": """
import time
def changed(bound):
    return replace(bound, forward=lambda *args, **kwargs: time.sleep(1000))
""",
}

Liars = Callable[..., None]


@pytest.fixture
def liars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liars]:
    """Installs some of `LIARS`, each a distribution of its own."""
    from jackfield.registry import discovery

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(*names: str) -> None:
        for name in names:
            module = f"outside_{name}"
            source = LIAR.replace("NAME", name).replace("# more", LIARS[name])
            (tmp_path / f"{module}.py").write_text(source)
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[jackfield]\n{name} = {module}\n")
        discovery._made.cache_clear()

    yield install
    discovery._made.cache_clear()
