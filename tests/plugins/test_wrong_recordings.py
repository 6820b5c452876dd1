"""Attentions, caches and compilers that declare what recordings need and do not keep to it.

Each is right where steps are run eagerly. Recorded, it must be named before the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build, prompts
from recordable import Gathers, gathered, in_turn
from tape import Tapes, record_on

import jackfield
from jackfield.bridge import step_trial
from jackfield.contracts import BoundAttention, PackedStep
from jackfield.errors import PlanError, PluginError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield_plugins.cache.paged import PagedCache
from jackfield_plugins.cache.paged.fixed import FixedPlace
from jackfield_plugins.cache.paged.store import PagedKVCache
from jackfield_plugins.compiler.cuda_graph import CudaGraphCompiler
from jackfield_plugins.compiler.cuda_graph.whole import Whole

POOL = "paged?page_size=4&num_tokens=512"
NAMED = ("query", "layer", "scaling", "softcap", "s_aux")


class ManyTapes(Tapes):
    changes = True


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch, ManyTapes)


class Layer:
    """A layer as an attention sees it, with some things other than they are."""

    def __init__(self, layer: Any, **other: Any) -> None:
        self._layer = layer
        for name, value in other.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def with_ends(layer: Any, ends: torch.Tensor) -> Layer:
    step = layer.step
    most = (step.max_seqlen_q, step.max_seqlen_k)
    return Layer(layer, step=PackedStep(step.spans, step.cu_seqlens_q, ends, *most))


def host_lengths(layer: Any) -> Any:
    ends = layer.step.seq_lens
    return with_ends(layer, torch.stack([ends.new_full((), s.kv_len) for s in layer.step.spans]))


class Planned:
    """Once a step, for all layers; as libraries do that plan a step before it runs."""

    def __init__(self, what: Callable[[Any], Any]) -> None:
        self._what = what
        self._made: dict[int | None, tuple[Any, Any]] = {}

    def __call__(self, layer: Any) -> Any:
        tables, made = self._made.get(layer.window, (None, None))
        if tables is not layer.tables:
            made = self._what(layer)
            self._made[layer.window] = layer.tables, made
        return made


def planned_lengths() -> Callable[[Any], Any]:
    plan = Planned(lambda layer: layer.step.seq_lens.clone())
    return lambda layer: with_ends(layer, plan(layer))


def planned_pages() -> Callable[[Any], Any]:
    plan = Planned(lambda layer: layer.block_table.clone())
    return lambda layer: Layer(layer, block_table=plan(layer))


def host_firsts(layer: Any) -> Any:
    first = layer.first.new_zeros(layer.first.shape)
    for row, at in enumerate(layer.tables.firsts):
        first[row].fill_(at)
    return Layer(layer, first=first)


def as_wide_as_now(layer: Any) -> Any:
    wide = max((len(pages) for pages in layer.tables.tables), default=1)
    return Layer(layer, block_table=layer.block_table[:, :wide])


ATTENTIONS: dict[str, tuple[Callable[[], Callable[[Any], Any]], str]] = {
    "reads lengths on the host": (lambda: host_lengths, "than the same step run eagerly"),
    "keeps the lengths of the step that it planned": (planned_lengths, "logits are off by"),
    "keeps the pages of the step that it planned": (planned_pages, "logits are off by"),
    "reads where pages begin on the host": (lambda: host_firsts, "reads firsts of the PageTables"),
    "reads how many pages there are on the host": (lambda: as_wide_as_now, "reads tables of the"),
}


def offer(patch: pytest.MonkeyPatch, backend: Any) -> str:
    mine = Registered(backend, "stranger", "1.2", "ep")
    known = [one for one in registry().backends[backend.kind] if one.name != backend.name]
    patch.setitem(registry().backends, backend.kind, [*known, mine])
    return f"plugin:stranger/{backend.name}"


def reading(seen: Callable[[], Callable[[Any], Any]], attend: Any = gathered) -> Gathers:
    class Wrong(Gathers):
        name = "wrong"

        def bind(self, context: Any) -> Any:
            change = seen()

            def packed(module: Any, query: Any, layer: Any, **kwargs: Any) -> Any:
                named = {name: kwargs.get(name) for name in NAMED[2:]}
                if layer.step.max_seqlen_q > 1:
                    return in_turn(query, layer, **named)
                return attend(query, change(layer), **named)

            def no(*_: Any, **__: Any) -> Any:
                raise NotImplementedError

            return BoundAttention(no, no, packed)

    return Wrong()


def said(model: Any, compiler: str = "cuda_graph", cache: str = POOL, **more: Any) -> Any:
    arguments = {"compile": compiler, "cache_implementation": cache, "max_batch_size": 2, **more}
    with jackfield.load(model, **arguments) as engine:
        done = engine.generate(prompts((5, 3, 9)), max_new_tokens=8)
        return [one.token_ids for one in done], engine.report()["compiler"]


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", name) for name in ATTENTIONS if "begin" not in name]
    + [("gemma3", name) for name in ATTENTIONS if "begin" in name or "planned" in name],
)
@pytest.mark.one_in(4)
def test_an_attention_that_cannot_be_recorded_is_named(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, words = ATTENTIONS[name]
    wrong, model = offer(monkeypatch, reading(seen)), build(family)
    right = said(model, "none", attn_implementation=offer(monkeypatch, Gathers()))[0]
    assert said(model, "none", attn_implementation=wrong)[0] == right
    with pytest.raises(PluginError, match=words) as caught:
        said(model, attn_implementation=wrong)
    assert str(caught.value).startswith("attention 'wrong' of stranger 1.2: ")
    assert caught.value.plugin == "attention 'wrong' of stranger 1.2"
    assert len(str(caught.value).splitlines()) == 1
    assert said(model, "none", attn_implementation=wrong)[0] == right  # nothing is left of it


def then(owner: Any, name: str, change: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    """`owner.name` does what it did, and then `change` of its object."""
    own = getattr(owner, name)

    def changed(self: Any, *given: Any) -> Any:
        found = own(self, *given)
        change(self)
        return found

    patch.setattr(owner, name, changed)


def _new_tables(place: Any) -> None:
    for table in place._tables:
        table.now.block_table = table.now.block_table.clone()


def _new_lengths(place: Any) -> None:
    step = place.step.tables[0].step
    step.seq_lens = step.seq_lens.clone()


def _stale_slots(place: Any) -> None:
    place._wide[2:].copy_(place._wide[2:].roll(1, 1) if place.rows > 1 else place._wide[2:] ^ 1)


def _new_pools(cache: Any) -> None:
    for group in cache.groups.values():
        for layer in group.pools.layers.values():
            layer.replace(layer.keys.clone(), layer.values.clone())


CACHES = {
    "puts its tables elsewhere": (FixedPlace, "_fill", _new_tables, r"moved what `fix\(1\)`"),
    "puts its lengths elsewhere": (FixedPlace, "_fill", _new_lengths, r"moved what `fix\(1\)`"),
    "has other slots": (FixedPlace, "_fill", _stale_slots, "logits are off by"),
    "moves its pages": (PagedKVCache, "admit", _new_pools, "moved the pages of layer 0"),
}


class Wrong(PagedCache):
    name = "wrong"


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_moves_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, change, words = CACHES[name]
    then(owner, method, change, monkeypatch)
    own = POOL.replace("paged", offer(monkeypatch, Wrong()))
    gathers = Registered(Gathers(), "jackfield", "0", "ep")
    known = registry().backends["attention"]
    monkeypatch.setitem(registry().backends, "attention", [*known, gathers])
    with pytest.raises(PluginError, match=words) as caught:
        said(build("llama"), cache=own, attn_implementation="gathers")
    assert str(caught.value).startswith("cache 'wrong' of stranger 1.2: ")


def test_a_cache_that_never_uses_its_places_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "_place_for", lambda *_: None)
    with pytest.raises(PluginError, match="prepare lays a step out elsewhere that has room in its"):
        said(build("llama"), attn_implementation=offer(monkeypatch, Gathers()))


def test_a_text_of_more_than_a_page_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant forgets all pages but the first of each row."""
    gathers = offer(monkeypatch, Gathers())
    monkeypatch.setattr(Registered, "own", True)

    def forget(place: Any) -> None:
        for table in place._tables:
            table.now.block_table[:, 1:] = 0

    then(FixedPlace, "_fill", forget, monkeypatch)
    with pytest.raises(PluginError, match=r"a recorded step of 1 rows .* logits are off by"):
        said(build("llama"), attn_implementation=gathers)


def test_a_compiler_that_plays_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all are jackfield's own, all of them are."""
    run = Whole.__call__

    def stale(self: Any, *inputs: Any) -> Any:
        found = run(self, *inputs)
        self.kept = getattr(self, "kept", {})
        return self.kept.setdefault(tuple(found.shape), found.clone())

    monkeypatch.setattr(Whole, "__call__", stale)
    gathers = offer(monkeypatch, Gathers())
    monkeypatch.setattr(Registered, "own", True)
    with pytest.raises(PluginError, match="logits are off by") as caught:
        said(build("llama"), attn_implementation=gathers)
    for named in ("attention 'gathers'", "cache 'paged'", "compiler 'cuda_graph'"):
        assert named in str(caught.value)


def test_what_nobody_named_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` took the compiler: its wrong steps are no error, and are not played."""
    gathers = offer(monkeypatch, Gathers())
    model, names = build("llama"), {"cache_implementation": POOL, "attn_implementation": gathers}
    texts = prompts((3, 9))
    with jackfield.load(model, compile="none", **names) as engine:
        due = [c.token_ids for c in engine.generate(texts, max_new_tokens=6)]
    monkeypatch.setattr(CudaGraphCompiler, "rank", lambda *_: 20)
    run = Whole.__call__
    monkeypatch.setattr(Whole, "__call__", lambda self, *given: run(self, *given).flip(-1))
    with jackfield.load(model, **names) as engine:
        assert engine.plan["compiler"].how == "auto"
        seen = engine.report()["compiler"].compiled
        assert seen.rows == ()
        assert seen.given_up.startswith("none is recorded whole: attention 'gathers' of stranger")
        assert [c.token_ids for c in engine.generate(texts, max_new_tokens=6)] == due
        assert engine._bound.cache.inner._fixed == []
        assert not engine.report()["compiler"].calls
    assert "logits are off by" in caplog.text


def test_auto_records_where_attention_and_cache_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = offer(monkeypatch, Gathers())
    monkeypatch.setattr(CudaGraphCompiler, "rank", lambda *_: 20)
    model = build("llama")
    for attention, cache, due in (
        (gathers, POOL, "cuda_graph"),
        ("sdpa", POOL, "none"),
        (gathers, "paged", "none"),  # whose pools grow on a CPU
        ("sdpa", "dynamic", "none"),
    ):
        plan = jackfield.plan(model, attn_implementation=attention, cache_implementation=cache)
        assert plan["compiler"].registered.name == due, (attention, cache)
    with pytest.raises(PlanError, match="cannot be recorded in whole steps: does not declare"):
        jackfield.plan(model, attn_implementation="sdpa", compile="cuda_graph")


def test_nothing_of_a_trial_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """No calls, no prompts, no pages; and what was recorded stays."""
    with jackfield.load(
        build("gemma3"),
        compile="cuda_graph",
        cache_implementation=POOL,
        attn_implementation=offer(monkeypatch, Gathers()),
        max_batch_size=3,
    ) as engine:
        usage = engine._bound.cache.usage()
        assert (usage.pages_used, usage.pages_kept, usage.prompt_tokens) == (0, 0, 0)
        report = engine.report()
        assert not report["attention"].decode
        assert not report["attention"].prefill
        assert report["compiler"].compiled.rows == (1, 2, 4)


def test_a_size_for_which_there_is_no_room_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be tried is not trusted; what it is asked for runs all the same."""
    gathers, small = offer(monkeypatch, Gathers()), "paged?page_size=4&num_tokens=20"
    how: Any = {"attn_implementation": gathers, "max_batch_size": 3}
    found, compiler = said(build("llama"), cache=small, **how)
    assert compiler.compiled.rows == (1, 2)
    assert "no room to try steps of 4 sequences" in compiler.compiled.given_up
    assert found == said(build("llama"), "none", small, **how)[0]


@pytest.mark.parametrize(
    ("found", "due", "off"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[1.0, 3.0]], [[1.0, 2.0]], 2**0.5),
        ([[1.0, 2.0], [0.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]], 2**0.5),
        ([[1.0, 2.0, 7.0]], [[1.0, 2.0, float("-inf")]], 0.0),
    ],
)
def test_how_far_logits_are_apart(found: Any, due: Any, off: float) -> None:
    assert step_trial.distance(torch.tensor(found), torch.tensor(due)) == pytest.approx(off)


def test_what_is_no_number_is_far_from_any() -> None:
    there = step_trial.distance(torch.tensor([[float("nan"), 1.0]]), torch.tensor([[1.0, 2.0]]))
    assert (
        not there <= step_trial.bound_of(torch.bfloat16, 10.0, traced=True) == step_trial.MOST_NOISE
    )
    assert step_trial.bound_of(torch.float64, 0.0, traced=False) < 1e-3  # layers compute in float32
