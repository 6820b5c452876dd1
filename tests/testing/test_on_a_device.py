"""What a backend is handed by `jackfield check --device D` lies on D; `meta` stands for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jackfield.contracts import Blocks, BoundAttention, PackedLayer, PackedStep, PageTables
from jackfield.testing.attention import (
    calls,
    faults,
    packed,
    padded,
    recording,
    rows,
    shapes,
    steps,
)
from jackfield.testing.attention.jobs import Job
from jackfield.testing.cache.states import States
from jackfield.testing.compiler.steps import SHAPES, inputs
from jackfield.testing.watching import Snapshot

ALL = frozenset({"sliding_window", "softcap", "sinks", "chunked", "position_bias"})
SUBJECT: Any = SimpleNamespace(
    seed=0, backend=SimpleNamespace(capabilities=SimpleNamespace(features=ALL)), device="meta"
)


class HandedError(Exception):
    """What an attention was handed."""

    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__()
        self.tensors = list(tensors([given, keywords]))


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from tensors(one)
    elif isinstance(thing, PackedLayer | PageTables | PackedStep | Blocks):
        names = [name for name in dir(thing) if name in HELD]
        yield from tensors([getattr(thing, name) for name in names])


HELD = ("keys", "values", "tables", "block_table", "first", "step", "seq_lens", "cu_seqlens_q",
        "blocks", "ends")  # fmt: skip


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    def handed(*given: Any, **keywords: Any) -> Any:
        raise HandedError(*given, **keywords)

    monkeypatch.setattr(Snapshot, "__init__", lambda self, **given: None)  # meta has no numbers
    monkeypatch.setattr(Snapshot, "check", lambda self: None)
    needs: Any = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dims=(8, 8))
    bound = BoundAttention(forward=handed, packed=handed, mask=lambda **given: given)
    return Job(bound, nn.Module(), needs, torch.float32, "meta")


def needs_of(feature: str) -> list[rows.Needs]:
    return [
        needs
        for shape in shapes.SHAPES
        if (shape.feature or "") == feature
        for needs in shape.needs(ALL)
    ]


FEATURES = ("", "sliding_window", "softcap", "sinks", "chunked", "position_bias")


def held_to_the_device(error: HandedError, most: int) -> None:
    assert len(error.tensors) >= most
    assert {tensor.device.type for tensor in error.tensors} == {"meta"}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.one_in(4)
def test_a_padded_call(job: Job, feature: str) -> None:
    for situation in rows.SITUATIONS.values():
        for needs in needs_of(feature):
            what = padded.made(job, padded.Case(situation[-1], needs), 0)
            with pytest.raises(HandedError) as caught:
                calls.called(job, what, ALL)
            held_to_the_device(caught.value, 3)
            assert {piece.seen.device.type for piece in what.pieces} == {"meta"}


@pytest.mark.parametrize("feature", [*FEATURES[:4], "bidirectional_blocks"])
@pytest.mark.one_in(4)
def test_a_packed_call(job: Job, feature: str) -> None:
    for situation in steps.SITUATIONS.values():
        for needs in needs_of(feature):
            case = packed.Case(situation[-1], needs)
            pieces = packed.made(job, case, 0)
            layer = steps.layer_of(pieces, case.packed, needs.window, 0)
            with pytest.raises(HandedError) as caught:
                packed.called(job, pieces, case, layer, SUBJECT)
            held_to_the_device(caught.value, 7)


def test_a_step_at_a_fixed_place() -> None:
    assert {t.device.type for t in tensors(recording._place(None, "meta"))} == {"meta"}


def test_the_formula_of_a_mistake(job: Job) -> None:
    case = padded.Case(rows.Rows(4, 3, ((3,),), told=True), rows.Needs(window=2))
    piece = padded.made(job, case, 0).pieces[0]
    for place in faults._positions(piece):
        assert place.device.type == "meta"


def test_steps_of_a_compiler_and_states_of_a_cache() -> None:
    for shape in SHAPES:
        assert {tensor.device.type for tensor in tensors(inputs(shape, 0, "meta"))} == {"meta"}
    states = States([((2, 4), (2, 4))], torch.float32, "meta")
    found = [*states.several([1, 2], 0), states.full((2, 3), 1.0)]
    assert {tensor.device.type for tensor in found} == {"meta"}
