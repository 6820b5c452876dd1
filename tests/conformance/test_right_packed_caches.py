"""Strangers' packed caches that are right, of many designs: nothing of them is a fault."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from drafting import ASSISTED, draft_of
from driven import Arrival, drive
from families import WINDOW, build, prompts
from right_caches import DESIGNS, Design, Right, RightCache, exactly, in_bfloat16, in_two_bits

import jackfield
from jackfield import Engine
from jackfield.contracts import Cache
from jackfield.engine import checked_pages
from jackfield.engine.checked_contents import READ_BACK, SAMPLES, Contents, Reading
from jackfield.engine.checked_packed import CheckedPackedCache
from jackfield.errors import PluginError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry

model_of = functools.cache(build)
(LONG,) = prompts((3 * WINDOW,))
DECODING = {"sample": "sample", "beam": "beam", "drafts": ASSISTED}


def arrivals() -> list[Arrival]:
    """Alike and unlike, short and long, samples, beams and drafts, some of them at once."""
    many = {"num_return_sequences": 6, "temperature": 0.9, "seed": 5}
    beams = {"decoding": "beam", "num_beams": 4, "num_return_sequences": 2}
    count = {"max_new_tokens": WINDOW + 3}
    repeated = [*LONG[:7], *LONG[:7], *LONG[:3]]
    return [
        Arrival(0, LONG, **count),
        Arrival(0, LONG[:5], **count),
        Arrival(1, LONG, **many, **count),
        Arrival(2, [*LONG[:9], 3, 4], **beams, max_new_tokens=9),
        Arrival(3, repeated, decoding="drafts", **count),
        Arrival(9, LONG[:-2], **count),
        Arrival(12, repeated, decoding="drafts", temperature=0.7, seed=2, **count),
        Arrival(14, LONG[:9], cache_salt="another", **count),
        Arrival(30, LONG[:6], **beams, max_new_tokens=12),
        Arrival(45, [*LONG[:9], 3, 4], **beams, max_new_tokens=9),  # as before
        Arrival(60, LONG, **many, **count),
    ]


def texts(engine: Engine) -> list[list[list[int]]]:
    return [[s.new_tokens for s in own] for own in drive(engine, arrivals())]


def load(family: str, cache: str) -> Engine:
    """The family's model and its draft model, each with a cache of its own."""
    return jackfield.load(
        model_of(family),
        cache_implementation=cache,
        decoding=DECODING,
        assistant_model=draft_of(family),
        assistant={"cache_implementation": cache},
    )


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    """What jackfield's own pages make of it, with which nobody gets into another's way."""
    with load(family, "paged") as engine:
        return texts(engine)


def offered(backend: Cache, monkeypatch: pytest.MonkeyPatch) -> str:
    mine = Registered(backend, "stranger", "1.2", "ep")
    monkeypatch.setitem(registry().backends, "cache", [*registry().backends["cache"], mine])
    return "plugin:right"


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.one_in(4)
def test_a_right_cache_is_found_right(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_pages, "FIRST", 10**6)  # every step is looked at closely
    design = DESIGNS[name]
    backend = Right(design)
    with load(family, offered(backend, monkeypatch)) as engine:
        assert isinstance(engine._loop.cache, CheckedPackedCache)
        found = texts(engine)
        figures = engine.statistics()
    made, drafts = backend.made
    if design.rounds is exactly:
        assert found == expected(family)
    assert figures.preemptions > 0
    assert figures.speculation is not None
    assert figures.speculation.accepted > 0
    assert drafts.truncated > 0
    assert bool(made.claimed) is design.shares
    assert bool(made.swapped) is design.swaps
    if not (design.copies or design.moves or design.page_size > len(LONG)):
        assert made.shared > 0


@pytest.mark.parametrize("rounding", [0.25, 0.0, 0.1])
def test_a_cache_that_rounds_by_more_than_it_says_is_named(
    rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = in_two_bits if rounding == 0.25 else in_bfloat16 if rounding == 0 else in_two_bits
    backend = Right(Design(rounds=rounds, rounding=rounding))
    cache = offered(backend, monkeypatch)
    with (
        jackfield.load(model_of("llama"), cache_implementation=cache) as engine,
        pytest.raises(PluginError, match=r"cache 'right' of stranger 1.2: write: the keys of la"),
    ):
        engine.generate(LONG, max_new_tokens=3)


@pytest.mark.parametrize("rounding", [1, -0.1, float("nan"), "0.1", None, True])
def test_a_rounding_that_is_none_is_named(rounding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = offered(Right(Design()), monkeypatch)
    monkeypatch.setattr(RightCache, "rounding", rounding)
    with pytest.raises(PluginError, match=r"right.*: rounding must be a number from 0 to below 1"):
        jackfield.load(model_of("llama"), cache_implementation=cache)


@pytest.mark.parametrize("after", [True, False])
def test_what_is_read_back_has_a_bound_however_many_continue_one_prompt(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds the samples of those that were there: handed on twice, they would double."""
    monkeypatch.setattr(checked_pages, "FIRST", 10**6)
    counts: list[int] = []
    inner = Contents._reading

    def reading(self: Contents, *args: Any) -> Reading:
        found = inner(self, *args)
        for request in {part.request for part in found.parts}:
            own = [p for p in found.parts if p.request == request and p.sample is not None]
            assert len({id(p.sample) for p in own}) == len(own)
            counts.append(sum(len(p.slots) for p in own))
        return found

    monkeypatch.setattr(Contents, "_reading", reading)
    cache = offered(Right(Design(shares=True, partly=True)), monkeypatch)
    with jackfield.load(model_of("llama"), cache_implementation=cache) as engine:
        if after:
            asked = [Arrival(8 * n, LONG, max_new_tokens=6) for n in range(24)]
        else:
            asked = [Arrival(0, LONG, max_new_tokens=6, num_return_sequences=24, top_k=9)]
        drive(engine, asked)
    assert 0 < max(counts) <= SAMPLES
    assert len(LONG) <= READ_BACK
