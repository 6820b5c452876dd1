"""A live model is given back as it was, also after failures; an engine survives those."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from driven import Gate
from families import build, oracle, prompts
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import jackfield
from jackfield.errors import ExecutionError, UsageError

PROMPTS = prompts((3, 7))
FAMILIES = ["llama", "gpt2", "falcon-alibi", "gemma3"]
ATTENTIONS = [("llama", "eager"), ("llama", "sdpa"), ("gpt2", "eager"), ("gpt2", "sdpa"),
              ("falcon-alibi", "eager"), ("gemma3", "sdpa")]  # fmt: skip


def state(model: Any) -> dict[str, Any]:
    """Everything about a model, and about transformers, that an engine could change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "config": model.config.to_dict(),
        "private": {k: v for k, v in vars(model.config).items() if "implementation" in k},
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "hooks": [[len(getattr(m, name)) for name in hooks] for m in model.modules()],
        "forwards": [m.forward.__func__ for m in model.modules()],
        "instance": [sorted(vars(m)) for m in model.modules()],
        "tables": [
            dict(AttentionInterface._global_mapping),
            dict(AttentionMaskInterface._global_mapping),
        ],
        "weights": [(n, p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()],
    }


def half_training(model: Any) -> None:
    """A frozen part inside a model that is being trained."""
    model.train()
    next(model.children()).eval()


@pytest.mark.parametrize(("family", "attention"), ATTENTIONS)
@pytest.mark.parametrize("prepare", [lambda m: m.eval(), lambda m: m.train(), half_training],
                         ids=["eval", "train", "half"])  # fmt: skip
def test_a_model_is_given_back_as_it_was(
    family: str, attention: str, prepare: Callable[[Any], Any]
) -> None:
    model = build(family)
    prepare(model)
    before = state(model)
    engine = jackfield.load(model, attn_implementation=attention)
    assert not any(module.training for module in model.modules())
    engine.generate(PROMPTS, max_new_tokens=3)
    next(engine.stream(PROMPTS[0], max_new_tokens=3))
    engine.close()
    engine.close()
    assert state(model) == before
    assert oracle(model.eval(), PROMPTS[0], 3)


def broken(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the kernel\nexploded")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_given_back_after_an_exception(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    before = state(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.get_output_embeddings()), "forward", broken)
        with pytest.raises(ExecutionError), jackfield.load(model) as engine:
            engine.generate(PROMPTS)
    assert state(model) == before
    with pytest.raises(ZeroDivisionError), jackfield.load(model):
        1 / 0  # noqa: B018
    assert state(model) == before


@pytest.mark.parametrize("kind", ["attention", "cache", "decoding", "scheduler"])
def test_a_backend_that_fails_to_bind_changes_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    before = state(model)
    backend = jackfield.plan(model)[kind].backend
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "bind", broken)
        with pytest.raises(jackfield.JackfieldError, match="the kernel"):
            jackfield.load(model)
    assert state(model) == before
    jackfield.load(model).close()


def test_a_model_runs_in_one_engine_at_a_time() -> None:
    model = build("llama")
    with jackfield.load(model) as engine:
        with pytest.raises(UsageError, match="already runs in an engine"):
            jackfield.load(model)
        assert len(engine.generate(PROMPTS[0], max_new_tokens=2)[0].token_ids) == 2
    jackfield.load(model).close()


def test_a_closed_engine_says_so() -> None:
    model = build("llama")
    engine = jackfield.load(model)
    gate = Gate(engine)
    stream = engine.stream(PROMPTS[0], max_new_tokens=9)
    unread = engine.stream(PROMPTS[0], max_new_tokens=9)
    gate.admit()
    next(stream)
    gate.close()
    for act in (
        lambda: engine.generate(PROMPTS[0]),
        lambda: engine.stream(PROMPTS[0]),
        lambda: next(stream),
        lambda: next(unread),
    ):
        with pytest.raises(UsageError, match="engine is closed"):
            act()
    stream.close()
    assert str(engine.explain()).startswith("LlamaForCausalLM")
    assert engine.report()["attention"].calls >= 2


def test_a_model_that_fails_is_an_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with jackfield.load(build("llama"), cache_implementation="dynamic") as engine:
        expected = [engine.generate(p, max_new_tokens=4)[0].token_ids for p in PROMPTS]
        gate = Gate(engine)
        done = engine.stream(PROMPTS[0], max_new_tokens=9)
        lost = engine.stream(PROMPTS[1], max_new_tokens=9)
        for _ in range(9 + 1):  # the second joins when the first one's batch has ended
            gate.admit()
        next(done)
        next(lost)
        with monkeypatch.context() as patch:
            patch.setattr(engine.model.model.layers[1].mlp, "forward", broken)
            gate.lift()
            with pytest.raises(ExecutionError, match="RuntimeError: the kernel") as caught:
                engine.generate(PROMPTS)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert caught.value.exit_code == 1
        assert "\n" not in str(caught.value)
        assert sum(len(delta.token_ids) for delta in done) == 8
        with pytest.raises(ExecutionError, match="the kernel"):
            list(lost)
        found = engine.generate(PROMPTS, max_new_tokens=4)
        assert [c.token_ids for c in found] == expected
        assert not engine._worker._open


def test_a_failure_in_one_thread_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = []
    with jackfield.load(build("llama")) as engine:
        barrier = threading.Barrier(4)

        def work() -> None:
            barrier.wait()
            try:
                outcomes.append(engine.generate(PROMPTS, max_new_tokens=20))
            except ExecutionError as error:
                outcomes.append(error)

        monkeypatch.setattr(engine.model.model.layers[1].mlp, "forward", broken)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [type(o) for o in outcomes] == [ExecutionError] * 4


def test_an_interrupt_goes_through_and_the_engine_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the main thread waits for a generation that takes long."""
    with jackfield.load(build("llama")) as engine:
        mlp = engine.model.model.layers[1].mlp
        inner = mlp.forward

        def interrupting(states: Any) -> Any:
            mlp.forward = inner  # once: the next one would meet whoever runs this test
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return inner(states)

        with monkeypatch.context() as patch:
            patch.setattr(mlp, "forward", interrupting)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, max_new_tokens=100)
            engine.close()  # waits for the last step
    with jackfield.load(engine.model) as again:
        assert len(again.generate(PROMPTS, max_new_tokens=4)) == 2


def test_a_model_that_exits_ends_the_requests_and_not_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(*args: Any, **kwargs: Any) -> None:
        raise SystemExit(3)

    with jackfield.load(build("llama")) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.model.model.layers[1].mlp, "forward", leave)
            with pytest.raises(ExecutionError, match="SystemExit: 3"):
                engine.generate(PROMPTS)
        assert len(engine.generate(PROMPTS, max_new_tokens=4)) == 2


def test_out_of_memory_of_one_batch_does_not_end_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with jackfield.load(build("llama")) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.model.model.layers[0].mlp, "forward", exhausted)
            with pytest.raises(ExecutionError, match="out of memory"):
                engine.generate(PROMPTS)
        assert len(engine.generate(PROMPTS, max_new_tokens=4)) == 2


def test_an_attention_that_a_layer_does_not_call_is_found_out() -> None:
    model = build("llama")

    def other(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    model.model.layers[1].self_attn.forward = other
    with jackfield.load(model, attn_implementation="sdpa") as engine:
        with pytest.raises(ExecutionError, match=r"'sdpa'.* not called by layers \[1\]"):
            engine.generate(PROMPTS[0])
        with pytest.raises(ExecutionError, match="not called"):
            engine.generate(PROMPTS[0])


def test_what_a_model_hands_to_an_attention_that_does_not_know_it_is_refused() -> None:
    """A feature that no config tells of: found out when the model runs, by name."""
    model = build("llama")
    inner = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *a, **k: inner(*a, **k, softcap=3.0)
    engine = jackfield.load(model, attn_implementation="sdpa")
    with engine, pytest.raises(ExecutionError, match=r"'softcap'.*does not declare"):
        engine.generate(PROMPTS[0])


def test_models_are_loaded_in_several_threads() -> None:
    """transformers changes its own classes while it loads."""
    level = logging.root.manager.disable
    with ThreadPoolExecutor(4) as pool:
        engines = list(pool.map(lambda _: jackfield.load("demo"), range(8)))
    for engine in engines:
        engine.close()
    jackfield.load("demo").close()
    assert logging.root.manager.disable == level
