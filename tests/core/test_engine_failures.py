"""What goes wrong in the middle: nobody hangs, nothing of another engine is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from driven import Gate
from families import build, config_of, prompts

import jackfield
from jackfield.errors import ExecutionError, UsageError


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return build("llama")


def test_two_models_that_share_a_config_do_not_share_an_attention() -> None:
    config = config_of("llama")
    one, two = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    with jackfield.load(one), pytest.raises(UsageError, match="shares its config"):
        jackfield.load(two)
    jackfield.load(two).close()


@pytest.mark.parametrize("count", [1, 3])
def test_a_layer_that_is_not_reached_fails_every_request(model: Any, count: int) -> None:
    with jackfield.load(model) as engine:
        inner: Any = engine._bound._forward
        called = engine._bound.attention._called
        engine._bound._forward = lambda inputs: (inner(inputs), called.clear())[0]
        with pytest.raises(ExecutionError, match="was not called by layers"):
            engine.generate(prompts((3,)), max_new_tokens=count)


@pytest.mark.parametrize("cache", ["dynamic", "paged"])
@pytest.mark.parametrize("other", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("first", [True, False])
def test_an_attention_switched_while_an_engine_runs_is_told(
    cache: str, other: str, first: bool
) -> None:
    model = build("llama")
    with jackfield.load(model, cache_implementation=cache) as engine:
        if first:
            engine.generate(prompts((3,)), max_new_tokens=2)
        running = engine.stream(prompts((5,))[0], max_new_tokens=100)
        if first:
            next(running)
        model.set_attn_implementation(other)
        with pytest.raises(ExecutionError, match=f"attention was switched to '{other}' while"):
            list(running)
        with pytest.raises(ExecutionError, match="was switched"):
            engine.generate(prompts((3,)), max_new_tokens=1)
    assert model.config._attn_implementation == other  # the later wish
    with jackfield.load(model) as engine:
        assert engine.generate(prompts((3,)), max_new_tokens=2)[0].finish_reason == "length"


@pytest.mark.parametrize("cache", ["dynamic", "paged"])
def test_an_attention_switched_inside_a_step_is_told(cache: str) -> None:
    model = build("llama")
    with jackfield.load(model, cache_implementation=cache) as engine:
        layer = model.model.layers[1]
        key = model.config._attn_implementation
        layer.register_forward_pre_hook(lambda *_: model.set_attn_implementation("eager"))
        layer.register_forward_hook(lambda *_: setattr(model.config, "_attn_implementation", key))
        with pytest.raises(ExecutionError, match=r"not called by layers \[1\]|was switched"):
            engine.generate(prompts((3,)), max_new_tokens=2)


def test_a_cache_that_cannot_let_go_fails_the_waiters_at_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jackfield.load(model) as engine:
        gate = Gate(engine)
        other = engine.stream(prompts((4,))[0], max_new_tokens=9)
        gate.admit()
        next(other)

        def release(_: Any) -> None:
            raise MemoryError("no room to select rows")

        monkeypatch.setattr(engine._loop.cache, "release", release)
        gate.lift()
        with pytest.raises((ExecutionError, MemoryError)):
            list(engine.stream(prompts((3,))[0], max_new_tokens=1))
        monkeypatch.undo()
        with pytest.raises((ExecutionError, MemoryError)):
            list(other)


def test_a_delivery_that_breaks_fails_every_request(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jackfield.load(model) as engine:
        gate = Gate(engine)
        first = engine.stream(prompts((4,))[0], max_new_tokens=9)
        gate.admit()
        next(first)

        def broken(_: Any) -> None:
            raise ValueError("no delta")

        monkeypatch.setattr(engine._worker, "_deltas", broken)
        gate.lift()
        with pytest.raises(ExecutionError, match="no delta"):
            list(first)
        monkeypatch.undo()
        assert len(engine.generate(prompts((3,)), max_new_tokens=2)[0].token_ids) == 2


def test_a_stream_closed_inside_a_step_leaves_the_step_alone(model: Any) -> None:
    expected = prompts((4, 5))
    with jackfield.load(model) as engine:
        alone = engine.generate(expected[1], max_new_tokens=4)[0].token_ids
        batch = [engine.stream(p, max_new_tokens=4) for p in expected]
        inner = engine._loop.forward

        def closing(inputs: Any) -> torch.Tensor:
            logits = inner(inputs)
            batch[0].close()
            return logits

        generator, other = batch
        iterator = iter(other)
        tokens = [*next(iterator).token_ids]
        next(generator)
        engine._loop.forward = closing
        generator.close()
        for delta in iterator:
            tokens += delta.token_ids
        assert tokens == alone
        worker = engine._worker
        with worker._changed:
            assert worker._changed.wait_for(lambda: not worker._open, 10)


def test_dropout_is_refused_rather_than_left_out(model: Any) -> None:
    with jackfield.load(
        model, attn_implementation="sdpa", cache_implementation="dynamic"
    ) as engine:
        attend = transformers.AttentionInterface._global_mapping[engine._bound.attention.key]
        layer = model.model.layers[0].self_attn
        states = [torch.ones(1, heads, 2, 8, dtype=torch.float64) for heads in (4, 2, 2)]
        with pytest.raises(ExecutionError, match="drops nothing out"):
            attend(layer, *states, None, scaling=1.0, dropout=0.5)
        assert attend(layer, *states, attention_mask=None, scaling=1.0, dropout=0.0)
