"""What an engine held is given back, whatever a plugin does meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from families import build, prompts

import jackfield
from jackfield.bridge import attention
from jackfield.engine import closing, worker
from jackfield.errors import ExecutionError, JackfieldError, PluginError
from jackfield.guarded import all_of
from jackfield_plugins.attention.sdpa import SdpaAttention as Sdpa

pytestmark = pytest.mark.timeout(120)  # what hangs does so for ever

Gate = Callable[[Any], Callable[..., Any]]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Makes a function hang until the test ends."""
    monkeypatch.setattr(closing, "CLOSE_WITHIN", 0.2)
    opened, entered = threading.Event(), threading.Event()

    def hanging(inner: Any) -> Callable[..., Any]:
        def waits(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            opened.wait()
            return inner(*args, **kwargs)

        waits.entered = entered  # type: ignore[attr-defined]
        return waits

    yield hanging
    opened.set()


def hang(engine: jackfield.Engine, entered: threading.Event) -> str:
    """What `close` says of a step that hangs."""
    request = engine.submit(prompts((5,))[0], max_new_tokens=4)
    assert entered.wait(30)
    with pytest.raises(ExecutionError) as caught:
        engine.close()
    assert engine.closed
    with pytest.raises(JackfieldError, match="closed"):
        request.result(5)
    engine.close()
    return str(caught.value)


def test_closing_says_which_plugin_hangs_in_what(gate: Gate) -> None:
    model = build("llama")
    engine = jackfield.load(model, cache_implementation="paged")
    cache: Any = engine._loop.cache
    cache.inner.prepare = waits = gate(cache.inner.prepare)
    said = hang(engine, waits.entered)  # type: ignore[attr-defined]
    assert "did not end within 0.2 s: it hangs in cache 'paged' of jackfield" in said
    assert "prepare; its thread is left behind" in said
    with jackfield.load(model) as again:  # is nobody's any more
        assert again.generate(prompts((3,)), max_new_tokens=1)


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_closing_says_in_which_layer_an_attention_hangs(
    gate: Gate, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = "packed" if cache == "paged" else "forward"
    inner = Sdpa.bind
    waits = gate(lambda: None)

    def bind(self: Sdpa, context: Any) -> Any:
        bound = inner(self, context)
        called = getattr(bound, what)

        def act(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module.layer_idx == 1:
                waits()
            return called(module, *args, **kwargs)

        return replace(bound, **{what: act})

    monkeypatch.setattr(Sdpa, "bind", bind)
    engine = jackfield.load(build("llama"), attn_implementation="sdpa", cache_implementation=cache)
    said = hang(engine, waits.entered)  # type: ignore[attr-defined]
    assert "it hangs in attention 'sdpa' of jackfield" in said
    assert f": {what} of layer 1; its thread is left behind" in said


def test_closing_says_that_the_model_hangs(gate: Gate) -> None:
    model = build("llama")
    engine = jackfield.load(model)
    layer = model.model.layers[1].mlp
    layer.forward = waits = gate(layer.forward)
    said = hang(engine, waits.entered)  # type: ignore[attr-defined]
    assert "hangs in the model's forward call" in said
    health = engine.health()
    assert not health.alive


def test_what_fails_while_it_closes_leaves_no_model_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama").train()
    engine = jackfield.load(model)
    monkeypatch.setattr(attention.AttentionBinding, "remove", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.close()
    monkeypatch.undo()
    assert model.training
    assert all(module.training for module in model.modules())
    with jackfield.load(model):
        assert not model.training


def test_the_error_of_a_request_is_not_hidden_by_that_of_the_closing() -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no release")

    with pytest.raises(RuntimeError, match="mine"):
        with_nothing(broken, RuntimeError("mine"))
    with pytest.raises(PluginError, match=r"cache '.*' of jackfield .*: release raised ValueError"):
        with_nothing(broken)


def with_nothing(broken: Any, error: Exception | None = None) -> None:
    with jackfield.load(build("llama")) as engine:
        cache: Any = engine._loop.cache
        cache.inner.release = broken
        if error is not None:
            raise error


def test_all_acts_are_done_and_the_first_failure_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []
    with pytest.raises(ZeroDivisionError):
        all_of((lambda: done.append(1), lambda: 1 / 0, lambda: int("x"), lambda: done.append(2)))
    assert done == [1, 2]
    assert "ValueError" in caplog.text


def idle(engine: jackfield.Engine) -> threading.Thread | None:
    """Its thread, once it has been idle for longer than an engine on the CPU keeps it."""
    engine.generate(prompts((3,)), max_new_tokens=1)
    time.sleep(3 * worker.LINGER)
    return engine._worker._thread


def test_an_idle_engine_keeps_its_thread_on_a_gpu_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert worker.linger_on("cuda") is worker.linger_on("mps") is None
    with jackfield.load(build("llama")) as engine:
        assert idle(engine) is None
    monkeypatch.setattr("jackfield.engine.assembly.linger_on", lambda device: None)
    with jackfield.load(build("llama")) as engine:
        thread = idle(engine)
        assert thread is not None
        assert idle(engine) is thread
    assert not thread.is_alive()
    engine = jackfield.load(build("llama"))
    thread = idle(engine)
    assert thread is not None
    del engine
    gc.collect()
    thread.join(closing.STOP_WITHIN)
    assert not thread.is_alive()


@pytest.mark.long
def test_a_thread_that_is_kept_does_not_keep_the_process() -> None:
    program = (
        "import jackfield, jackfield.engine.assembly as assembly\n"
        "assert assembly.linger_on\n"
        "assembly.linger_on = lambda device: None\n"
        "one = jackfield.load('demo'); one.generate('a', max_new_tokens=1); print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "done\n"
