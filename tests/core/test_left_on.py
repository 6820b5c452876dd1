"""A processor that leaves something of torch on ends its own request, and nobody's else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield.sampling.fenced import OwnFailure, fenced
from jackfield.sampling.left_on import surroundings

VICTIM = [5] * 17
KEPT: list[Any] = []  # an inference mode ends with its object


class Sticky(TorchFunctionMode):
    """A mode that does not want to be left."""

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("no")


class StickyDispatch(TorchDispatchMode):
    def __exit__(self, *_: object) -> None:
        pass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def entering(make: Callable[[], Any]) -> Callable[[], None]:
    def act() -> None:
        KEPT.append(make())
        KEPT[-1].__enter__()

    return act


LEAVES: dict[str, tuple[str, Callable[[], Any]]] = {
    "set_default_device": ("default device meta", lambda: torch.set_default_device("meta")),
    "device": ("default device meta", entering(lambda: torch.device("meta"))),
    "fake": ("FakeTensorMode", entering(FakeTensorMode)),
    "sticky": ("Sticky", entering(Sticky)),
    "sticky_dispatch": ("StickyDispatch", entering(StickyDispatch)),
    "autocast": ("torch.autocast", entering(lambda: torch.autocast("cpu", torch.bfloat16))),
    "grad": ("set_grad_enabled(True)", lambda: torch.set_grad_enabled(True)),
    "inference": ("inference_mode(False)", entering(lambda: torch.inference_mode(False))),
    "threads": ("set_num_threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with jackfield.load(LlamaForCausalLM(config)) as engine:
        yield engine


@pytest.mark.parametrize("name", LEAVES)
def test_what_is_left_on_ends_its_request_alone(engine: Any, name: str) -> None:
    told, act = LEAVES[name]
    asked = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "eos_token_id": []}
    (alone,) = engine.generate(VICTIM, **asked)

    def bad(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        act()
        return scores

    victim = engine.submit(VICTIM, **asked)
    poison = engine.submit([7], logits_processor=bad, max_new_tokens=4).result(60)
    assert poison.finish_reason == "error"
    assert "logits_processor failed: it left" in poison.error
    assert told in poison.error
    assert victim.result(60).token_ids == alone.token_ids
    (again,) = engine.generate(VICTIM, **asked)
    assert again.token_ids == alone.token_ids


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", LEAVES)
def test_everything_is_put_back(name: str, raises: bool) -> None:
    told, act = LEAVES[name]

    def bad() -> None:
        act()
        if raises:
            raise ValueError

    with torch.inference_mode():
        before = surroundings()
        with pytest.raises(OwnFailure, match="it left") as failure:
            fenced("logits_processor", 0, bad)
        assert told in str(failure.value)
        assert surroundings() == before
        assert torch.ones(2).device.type == "cpu"
        assert type(torch.ones(2)) is torch.Tensor


def test_what_was_on_before_stays_on() -> None:
    with torch.device("meta"), torch.no_grad():
        before = surroundings()
        with pytest.raises(OwnFailure, match="it left"):
            fenced("logits_processor", 0, lambda: torch.set_default_device("cpu"))
        assert surroundings() == before
        assert fenced("logits_processor", 0, lambda: torch.ones(2)).is_meta
    assert surroundings().functions == ()


def test_what_is_ended_is_no_error() -> None:
    def good() -> int:
        with torch.device("meta"), FakeTensorMode(), torch.enable_grad(), torch.autocast("cpu"):
            return torch.ones(2, device="meta").shape[0]

    assert fenced("logits_processor", 0, good) == 2
