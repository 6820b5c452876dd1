"""A live model that somebody changes between two requests: recorded and compiled steps see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import build, prompts
from recordable import offer
from tape import Again, Tapes, record_on
from torch import nn

import jackfield
from jackfield.bridge.step_trial import StepTrial
from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.cuda_graph import CudaGraphCompiler

POOL = "paged?page_size=4&num_tokens=512"
(TEXT,) = prompts((7,))


class Scaled(nn.Module):
    scale = 1.0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helped(self.inner(x) * self.scale)

    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Odd(nn.Module):
    """Code that reads whatever a module can have."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.Sequential(inner)
        self.table: Any = {"a": [[1.0]]}
        self.vector = torch.zeros_like(inner.weight[:, 0])
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.clone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.parts(x) * self.table["a"][0][0])
        if hasattr(self, "extra"):
            y = y + self.extra
        return y + self.vector


def model() -> Any:
    found: Any = build("llama")
    for layer in found.model.layers:
        layer.mlp.down_proj = Odd(layer.mlp.down_proj)
        layer.mlp.up_proj = Scaled(layer.mlp.up_proj)
    return found


def each(what: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            what(layer.mlp)

    return change


def ones(mlp: Any) -> torch.Tensor:
    return 5 * torch.ones_like(mlp.down_proj.vector)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute over the class's": each(lambda mlp: setattr(mlp.up_proj, "scale", -3.0)),
    "an attribute of the class": lambda _: setattr(Scaled, "scale", -2.5),
    "a method that is not forward": lambda _: setattr(Scaled, "helped", lambda self, x: -2 * x),
    "a part more": each(lambda mlp: mlp.down_proj.parts.append(nn.Tanh())),
    "a setting in a table": each(lambda mlp: mlp.down_proj.table["a"][0].__setitem__(0, -3.0)),
    "a tensor for another": each(lambda mlp: setattr(mlp.down_proj, "vector", ones(mlp).cumsum(0))),
    "a function for another": each(lambda mlp: setattr(mlp.down_proj, "act", torch.sin)),
    "a buffer more": each(lambda mlp: mlp.down_proj.register_buffer("extra", ones(mlp).cumsum(0))),
    "a parameter more": each(
        lambda mlp: setattr(mlp.down_proj, "extra", nn.Parameter(ones(mlp).cumsum(0)))
    ),
    "a hook": each(lambda mlp: mlp.register_forward_hook(lambda _, __, out: -2 * out)),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    record_on(monkeypatch, Recording)
    offer(monkeypatch)
    yield
    restore()


class Recording(Tapes):
    changes = True


def said(compiler: str, change: Callable[[Any], Any]) -> list[list[int]]:
    """What is said before, and twice after the change."""
    own = model()
    names = {"attn_implementation": "gathers", "cache_implementation": POOL}
    with jackfield.load(own, compile=compiler, max_batch_size=1, **names) as engine:

        def say() -> list[int]:
            return engine.generate(TEXT, max_new_tokens=8)[0].token_ids

        before = say()
        with torch.no_grad():
            change(own)
        return [before, say(), say()]


def compared(compiler: str, name: str) -> None:
    due = said("none", CHANGES[name])
    restore()
    assert due[0] != due[1]
    assert said(compiler, CHANGES[name]) == due
    restore()


ORIGINAL = Scaled.helped


def restore() -> None:
    """The class as it was."""
    Scaled.scale = 1.0
    Scaled.helped = ORIGINAL  # type: ignore[method-assign]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.one_in(4)
def test_a_whole_step(name: str) -> None:
    compared("cuda_graph", name)


@pytest.mark.parametrize("name", ["a hook", "a part more", "a tensor for another"])
def test_a_step_that_torch_traced(name: str) -> None:
    compared("inductor?backend=eager", name)
    compared("cuda_graph?record=between", name)


def test_a_step_that_inductor_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch, Again)
    compared("cuda_graph?fuse=true", "a tensor for another")


def test_hooks_are_called_in_every_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that do something else each time; once they are gone, steps are played again."""
    own, names = model(), {"attn_implementation": "gathers", "cache_implementation": POOL}
    with jackfield.load(own, compile="cuda_graph", max_batch_size=1, **names) as engine:
        played = engine.report()["compiler"].compiled.whole
        calls: list[int] = []
        hook = own.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        engine.generate(TEXT, max_new_tokens=8)
        assert len(calls) == 8
        assert engine.report()["compiler"].compiled.whole == played
        assert caplog.text.count("are not played from recordings now: the model has hooks") == 1
        assert "has hooks" in engine.report()["compiler"].compiled.given_up
        hook.remove()
        engine.generate(TEXT, max_new_tokens=8)
        assert engine.report()["compiler"].compiled.given_up is None
        assert engine.report()["compiler"].compiled.whole == played + 7
    hooked = model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ExecutionError, match=r"the model has hooks.*; load it without compile"):
        jackfield.load(hooked, compile="cuda_graph", max_batch_size=1, **names)
    monkeypatch.setattr(CudaGraphCompiler, "rank", lambda *_: 20)  # which `auto` takes then
    with jackfield.load(hooked, max_batch_size=1, **names) as engine:
        assert "has hooks" in engine.report()["compiler"].compiled.given_up
        assert engine.generate(TEXT, max_new_tokens=4)[0].error is None


def test_an_error_of_a_hook_is_the_model_s() -> None:
    own, names = model(), {"attn_implementation": "gathers", "cache_implementation": POOL}

    def fail(module: Any, given: Any) -> None:
        if given[0].shape[1] == 1:
            raise ValueError("mine")

    with jackfield.load(own, compile="cuda_graph", max_batch_size=1, **names) as engine:
        hook = own.model.layers[0].mlp.register_forward_pre_hook(fail)
        with pytest.raises(jackfield.JackfieldError, match="the model failed: ValueError: mine"):
            engine.generate(TEXT, max_new_tokens=4)
        hook.remove()
        engine.generate(TEXT, max_new_tokens=4)
        assert engine.report()["compiler"].compiled.rows == (1,)


def test_a_model_that_is_changed_all_day_is_played_all_day() -> None:
    own, names = model(), {"attn_implementation": "gathers", "cache_implementation": POOL}
    with jackfield.load(own, compile="cuda_graph", max_batch_size=1, **names) as engine:
        for _ in range(12):
            with torch.no_grad():
                own.lm_head.weight.data = own.lm_head.weight.data.clone()
            engine.generate(TEXT, max_new_tokens=4)
        seen = engine.report()["compiler"].compiled
        assert (seen.rows, seen.given_up, seen.whole) == ((1,), None, 36)


def test_memory_that_is_not_there_costs_the_recordings_that_nobody_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eagerly(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StepTrial, "eagerly", eagerly)
    names = {"attn_implementation": "gathers", "cache_implementation": POOL}
    with pytest.raises(ExecutionError, match="CUDA out of memory; load it without compile"):
        jackfield.load(model(), compile="cuda_graph", max_batch_size=1, **names)
    monkeypatch.setattr(CudaGraphCompiler, "rank", lambda *_: 20)
    with jackfield.load(model(), max_batch_size=1, **names) as engine:
        assert "CUDA out of memory" in engine.report()["compiler"].compiled.given_up
        assert engine.generate(TEXT, max_new_tokens=4)[0].error is None
