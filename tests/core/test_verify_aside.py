"""`verify` changes nothing: neither counts nor the model, and no backend is held to more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build, prompts
from wrong_caches import packed

import jackfield
from jackfield.contracts import Backend, PackedLayer
from jackfield.engine.report import Report
from jackfield.errors import ExecutionError

PROMPTS = prompts((5, 14, 23))


def observed(name: str, verify: bool, arguments: dict[str, Any]) -> Report:
    with jackfield.load(build(name, torch.float32), verify=verify, **arguments) as engine:
        engine.generate(PROMPTS, max_new_tokens=5)
        found = engine.report()
    assert (found.verified is not None) == verify
    return found


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("llama", {"kernels": "cpu-rms-norm", "cache_implementation": "paged"}),
        ("llama", {"compile": "inductor?backend=eager"}),
        ("bloom", {}),  # its attention is part of its code
        ("falcon-alibi", {}),
    ],
)
@pytest.mark.one_in(4)
def test_what_is_computed_again_is_not_counted(name: str, arguments: dict[str, Any]) -> None:
    found, due = (observed(name, verify, arguments) for verify in (True, False))
    for mine, other in zip(found.observations, due.observations, strict=True):
        assert (mine.name, mine.calls) == (other.name, other.calls)
        assert (mine.prefill, mine.decode) == (other.prefill, other.decode)


def state(model: Any) -> Any:
    modules = list(model.modules())
    return (
        model.config._attn_implementation_internal,
        [vars(module).get("forward") for module in modules],
        sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules),
    )


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_model_that_cannot_be_computed_again_is_left_as_it_was(at: int) -> None:
    """At the first and the second time of a sequence, and at the next sequence."""
    model, calls, fails = build("llama", torch.float32), 0, True

    def failing(module: Any, args: Any) -> None:
        nonlocal calls
        if "recomputed" in model.config._attn_implementation_internal:
            calls += 1
            if fails and calls >= at:
                raise MemoryError("no room")

    before = state(model)
    hook = model.model.layers[1].register_forward_pre_hook(failing)
    with jackfield.load(model, verify=2, kernels="cpu-rms-norm") as engine:
        running = state(model)
        for _ in range(2):
            with pytest.raises(
                ExecutionError, match=r"^verify: the model cannot compute \d+ tokens again"
            ) as caught:
                engine.generate(PROMPTS, max_new_tokens=4)
            assert str(caught.value).endswith("MemoryError: no room; mend that, or drop verify")
            assert state(model) == running
        fails = False
        engine.generate(PROMPTS, max_new_tokens=4)
        verified = engine.report().verified
        assert verified is not None
        assert verified.steps == 2
    hook.remove()
    assert state(model) == before


def test_pages_may_be_used_again_when_an_attention_has_returned(
    plug: Callable[[Backend], str],
) -> None:
    """As a cache does whose layers share one place on the device."""
    place: list[PackedLayer] = []

    def write(own: Any, number: int, keys: Any, values: Any) -> PackedLayer:
        found = own(number, keys, values)
        if not place or place[0].keys.shape != found.keys.shape:
            place[:] = [PackedLayer(found.keys.clone(), found.values.clone(), found.tables)]
        place[0].keys.copy_(found.keys)
        place[0].values.copy_(found.values)
        place[0].tables = found.tables
        return place[0]

    sharing = plug(packed(write=write))
    with jackfield.load(build("llama"), verify=True, cache_implementation=sharing) as engine:
        engine.generate(PROMPTS, max_new_tokens=5)
        verified = engine.report().verified
    assert place
    assert verified is not None
    assert verified.steps == 5
    assert not verified.rounded
