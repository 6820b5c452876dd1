"""What surrounds a call: refused, in force in the engine's thread, or without effect on a text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from driven import ways
from families import build
from torch.nn.attention import SDPBackend, sdpa_kernel

import jackfield
from jackfield.errors import UsageError

PROMPTS = [[5, 6, 7, 8, 9], [3, 2, 4], [11, 12, 13, 14]]
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 6, "temperature": 1.3, "top_p": 0.97, "repetition_penalty": 1.1, "seed": 3,
    "sequence_bias": {(5,): 0.3}, "frequency_penalty": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[jackfield.Engine]:
    with jackfield.load(build("llama", torch.float32)) as found:
        yield found


def text(engine: jackfield.Engine, **more: Any) -> list[list[int]]:
    found = engine.generate(PROMPTS[:2], **SETTINGS, **more)
    assert [c.error for c in found] == [None, None]
    return [c.token_ids for c in found]


@contextlib.contextmanager
def changed(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def a_default_dtype() -> AbstractContextManager[None]:
    return changed(torch.set_default_dtype, torch.float64, torch.get_default_dtype())


def a_coarse_default_dtype() -> AbstractContextManager[None]:
    return changed(torch.set_default_dtype, torch.bfloat16, torch.get_default_dtype())


def deterministic() -> AbstractContextManager[None]:
    return changed(torch.use_deterministic_algorithms, True, False)


def threads() -> AbstractContextManager[None]:
    return changed(torch.set_num_threads, 2, torch.get_num_threads())


WITHOUT_EFFECT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast of another device": lambda: torch.autocast("cuda", torch.bfloat16),
    "autocast that is off": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
    "default device": lambda: torch.device("meta"),
    "default dtype": a_default_dtype,
    "coarse default dtype": a_coarse_default_dtype,
    "deterministic algorithms": deterministic,
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "kernels of sdpa": lambda: sdpa_kernel([SDPBackend.MATH]),
    "no gradients": torch.no_grad,
    "threads": threads,
}


@pytest.mark.filterwarnings("ignore:.*CUDA is not available.*")
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_the_text_is_the_same_inside(engine: jackfield.Engine, name: str) -> None:
    alone = text(engine)
    with WITHOUT_EFFECT[name]():
        assert text(engine) == alone
        request = engine.submit(PROMPTS[0], **SETTINGS)
    assert request.result().token_ids == alone[0]


def test_autocast_is_refused_by_name(engine: jackfield.Engine) -> None:
    alone = text(engine)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for call in ways(engine):
                with pytest.raises(UsageError, match=r"torch\.autocast.*dtype='b?float16'"):
                    call(PROMPTS[0], max_new_tokens=2)
            with pytest.raises(UsageError, match=r"torch\.autocast"):
                jackfield.load("demo")
            jackfield.plan("demo")
    assert text(engine) == alone


#: Of the whole process: what holds while a step runs, holds for it.
OF_THE_PROCESS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "default dtype": (a_default_dtype, torch.get_default_dtype),
    "deterministic algorithms": (deterministic, torch.are_deterministic_algorithms_enabled),
    "kernels of sdpa": (
        lambda: sdpa_kernel([SDPBackend.MATH]),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "threads": (threads, torch.get_num_threads),
}
#: Of the caller's thread alone: the engine's has its own.
OF_A_THREAD: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "default device": (lambda: torch.device("meta"), torch.get_default_device),
    "gradients": (torch.enable_grad, torch.is_grad_enabled),
    "inference mode": (
        lambda: torch.inference_mode(mode=False),
        torch.is_inference_mode_enabled,
    ),
}


@pytest.mark.parametrize("name", [*OF_THE_PROCESS, *OF_A_THREAD])
def test_what_holds_while_a_step_runs(engine: jackfield.Engine, name: str) -> None:
    """As the page of departures says, seen from inside of a step."""
    around, ask = {**OF_THE_PROCESS, **OF_A_THREAD}[name]
    seen: set[Any] = set()

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.add(ask())
        return scores

    text(engine, logits_processor=look)
    (usual,) = seen
    seen.clear()
    with around():
        text(engine, logits_processor=look)
        assert seen == ({ask()} if name in OF_THE_PROCESS else {usual})


def test_torchs_seed_decides(engine: jackfield.Engine) -> None:
    import transformers

    asked = {**SETTINGS, "temperature": 2.0}
    del asked["seed"]

    def drawn(**more: Any) -> list[list[int]]:
        found = engine.generate(PROMPTS, **asked, **more)
        return [c.token_ids for c in found]

    for seeded in (torch.manual_seed, transformers.set_seed):
        for more in ({}, {"num_return_sequences": 3}):
            seeded(5)
            first, second = drawn(**more), drawn(**more)
            seeded(5)
            assert drawn(**more) == first != second
            seeded(6)
            assert drawn(**more) != first
    torch.manual_seed(5)
    engine.generate(PROMPTS[:2], max_new_tokens=2)  # greedy: draws nothing
    engine.generate(PROMPTS[:2], max_new_tokens=2, temperature=1.0, seed=3)
    follows = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(follows, torch.rand(()))
    torch.manual_seed(5)
    at_once = drawn()
    torch.manual_seed(5)
    requests = [engine.submit(prompt, **asked) for prompt in PROMPTS]
    assert [request.result().token_ids for request in requests] == at_once
