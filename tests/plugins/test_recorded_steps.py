"""Whole decode steps, recorded with their attention and pages, say what unrecorded ones say.

What is recorded once per number of rows is played for all later steps, with nothing changed but
what lies in the fixed place: a tape plays the very operations again (`tape.py`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import extras
import pytest
import torch
from driven import Arrival, drive, tokens
from families import build, prompts
from recordable import offer
from tape import Again, Host, Tapes, launching, record_on

import jackfield
from jackfield.errors import ExecutionError, PlanError
from jackfield.registry.backends import Registered
from jackfield_plugins.cache.paged import fixed
from jackfield_plugins.compiler.cuda_graph import compilation, stretches

ERROR = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
POOL = "paged?page_size=4&num_tokens=512"


class WholeTapes(Tapes):
    """`fails_at`: of so many rows a whole step cannot be recorded."""

    changes = True
    fails_at: int | None = None

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        result, play = super().record(run)
        whole = run.__qualname__.startswith("Whole.")
        if whole and result.shape[:2] == (1, self.fails_at):
            raise ERROR
        return result, play


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> type[WholeTapes]:
    class Mine(WholeTapes):
        pass

    record_on(monkeypatch, Mine)
    offer(monkeypatch)
    return Mine


BOTH = "cuda_graph?record=both"


def load(model: Any, compiler: str = BOTH, cache: str = POOL, **more: Any) -> Any:
    more = {"attn_implementation": "gathers", "max_batch_size": 5, **more}
    return jackfield.load(model, cache_implementation=cache, compile=compiler, **more)


def compiled(engine: jackfield.Engine) -> Any:
    return engine.report()["compiler"].compiled


def coming_and_going() -> list[Arrival]:
    """Joins, leaves, every number of rows up to five, and prompts that share their first pages."""
    shared = prompts((21,))[0]
    texts = [*prompts((3, 11, 9)), shared, [*shared[:16], 7, 8], [*shared, 9], *prompts((1, 8))]
    return [
        Arrival(3 * (n % 3) + n, text, max_new_tokens=4 + 3 * (n % 4))
        for n, text in enumerate(texts)
    ]


FAMILIES = ["llama", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_requests_that_come_and_go(family: str) -> None:
    model, found, counted = build(family), {}, {}
    for compiler in ("none", BOTH):
        with load(model, compiler) as engine:
            if compiler == BOTH:
                before = compiled(engine)
                assert before.rows == (1, 2, 4, 8)
                assert before.graphs == 4
            found[compiler] = tokens(drive(engine, coming_and_going()))
            usage = engine._bound.cache.usage()
            assert usage.prefix_tokens
            report = engine.report()
            counted[compiler] = (report["attention"].prefill, report["attention"].decode)
    assert found[BOTH] == found["none"]
    assert counted[BOTH] == counted["none"]
    after = report["compiler"].compiled
    assert after.graphs == 4  # nothing was recorded after loading
    assert after.whole == report["compiler"].calls > 10
    assert after.given_up is None


def test_steps_that_inductor_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused on a CPU, which has other kernels and the same graph, pages and places."""
    record_on(monkeypatch, Again)
    model, texts, found = build("llama"), prompts((9, 5, 12)), {}
    for compiler in ("none", "cuda_graph", "cuda_graph?fuse=true"):
        with load(model, compiler, max_batch_size=2) as engine:
            done = engine.generate(texts, max_new_tokens=9, output_logits=True)
            found[compiler] = torch.cat([c.logits for c in done])
            seen = compiled(engine)
            assert compiler == "none" or (seen.rows == (1, 2) and seen.given_up is None)
            source = engine.report()["compiler"].source or ""
            assert ("fused by inductor" in source) == compiler.endswith("fuse=true")
    assert Again.played
    for compiler, logits in found.items():
        torch.testing.assert_close(logits, found["none"], msg=compiler)


@pytest.mark.long
def test_a_model_of_other_sizes_before_changes_nothing() -> None:
    """torch remembers numbers that differed, by the name of the code, and makes them inputs."""
    for compiler in ("inductor", "cuda_graph"):
        with load("demo", compiler) as engine:
            engine.generate(["Once upon a time"], max_new_tokens=5)
    model = build("llama")
    with load(model) as engine:
        engine.generate(prompts((3, 5)), max_new_tokens=5)
        assert compiled(engine).given_up is None
        assert compiled(engine).graphs == 4


def test_one_engine_through_all_that_a_cache_does(
    tapes: type[WholeTapes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemptions, drafts, beams, more rows and longer texts than were recorded, a moved weight."""
    monkeypatch.setattr(compilation, "MOST_ROWS", 2)
    monkeypatch.setattr(fixed, "MOST_TOKENS", 40)
    model, small = build("llama"), "paged?page_size=4&num_tokens=72&swap=true"
    texts = [[7, 8, 9, 10] * 6, [3, 4, 5] * 6, *prompts((17, 5))]
    found: dict[str, list[Any]] = {"none": [], BOTH: []}
    for compiler, said in found.items():
        strategies = {"decoding": {"plain": "sample", "drafts": "prompt_lookup", "beam": "beam"}}
        with load(model, compiler, small, **strategies) as engine:
            recorded = compiler == BOTH
            assert not recorded or compiled(engine).rows == (1, 2)

            def say(given: Any, said: Any = said, **settings: Any) -> int:
                """How many steps were played whole."""
                before = engine.report()
                done = engine.generate(given, **settings)
                said.append([c.token_ids for c in done])
                seen = engine.report().since(before)["compiler"].compiled
                return seen.whole if seen else 1

            assert say(texts, max_new_tokens=14)
            preemptions = engine.statistics().preemptions
            assert preemptions
            plain = say(texts[3], max_new_tokens=9)
            assert plain == (8 if recorded else 1)
            assert say(texts[:2], decoding="drafts", max_new_tokens=12)
            beams = say(texts[3], decoding="beam", num_beams=2, max_new_tokens=6)
            assert beams
            # the last steps of a text that outgrows its table are not played whole
            longer = say(texts[3], max_new_tokens=60)
            assert longer == (35 if recorded else 1)
            graphs_before = compiled(engine).graphs if recorded else 0
            with torch.no_grad():
                model.lm_head.weight.data = -model.lm_head.weight.data
            assert say(texts[3], max_new_tokens=9)
            with torch.no_grad():
                model.lm_head.weight.data = -model.lm_head.weight.data
            if recorded:
                assert compiled(engine).graphs == graphs_before + 1  # what moved is recorded again
                assert tapes.played
    assert found[BOTH] == found["none"]
    assert found["none"][1] != found["none"][-1]


@pytest.mark.parametrize("forgotten", ["numbers", "tables"])
def test_steps_that_are_not_copied_to_their_place_say_something_else(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So these tests can fail: a mutant of the cache fills its place once and never again."""
    monkeypatch.setattr(Registered, "own", True)  # else the checks of pages would say it first
    model, texts = build("llama"), prompts((9, 14))
    with load(model, "none") as engine:
        expected = [c.token_ids for c in engine.generate(texts, max_new_tokens=12)]
    with load(model, max_batch_size=1) as engine:
        assert engine.generate(texts[0], max_new_tokens=12)[0].token_ids == expected[0]
        (place,) = engine._bound.cache.inner._fixed
        if forgotten == "numbers":
            monkeypatch.setattr(place, "_numbers", lambda *_: None)
        else:
            (table,) = place._tables
            monkeypatch.setattr(table, "fill", lambda tables: setattr(table.now, "tables", tables))
        assert engine.generate(texts[1], max_new_tokens=12)[0].token_ids != expected[1]


def test_a_size_that_cannot_be_recorded_runs_between_attentions(
    tapes: type[WholeTapes], caplog: pytest.LogCaptureFixture
) -> None:
    """While loading, and later: from then on, and the report says so; nothing is half recorded."""
    model, texts = build("llama"), prompts((9, 4, 11))
    with load(model, "none") as engine:
        expected = [c.token_ids for c in engine.generate(texts, max_new_tokens=8)]
    tapes.fails_at = 2
    with load(model) as engine:
        seen = compiled(engine)
        assert (seen.rows, seen.graphs) == ((1,), 1)
        assert seen.given_up == (
            "2 rows are not recorded whole: compiler 'cuda_graph' of jackfield "
            f"{jackfield.__version__}: cuda_graph cannot compile LlamaForCausalLM: CUDA error: "
            "operation not permitted when stream is capturing; load it without compile"
        )
        assert f"steps of {seen.given_up}" in caplog.text
        assert seen.given_up in str(engine.report())
        tapes.fails_at = None
        assert [c.token_ids for c in engine.generate(texts, max_new_tokens=8)] == expected
        assert engine.generate(texts[0], max_new_tokens=8)[0].token_ids == expected[0]
        assert compiled(engine).whole == 7
        with torch.no_grad():  # so the one that there is has to be recorded again, and cannot be
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
        tapes.fails_at = 1
        assert engine._bound.cache.inner._fixed
        assert engine.generate(texts[0], max_new_tokens=8)[0].token_ids == expected[0]
        assert compiled(engine).rows == ()
        assert compiled(engine).whole == 7
        assert not engine._bound.cache.inner._fixed
        counted = engine.report()["attention"].decode
        assert set(counted.values()) == {7 + 7 + 7}


def test_verified_beside_steps_that_are_played(tapes: type[WholeTapes]) -> None:
    """Only what a step called itself is compared with it: neither what one before it did that
    failed, nor what was called to record it again.
    """
    model = build("llama", torch.float32)
    with load(model, max_batch_size=1, verify=30) as engine:

        def failing(*_: Any) -> None:
            raise MemoryError("no room")

        hook = model.model.layers[1].register_forward_pre_hook(failing)
        with pytest.raises(ExecutionError, match="no room"):
            engine.generate([[5, 6, 7, 8, 9]], max_new_tokens=2)
        hook.remove()
        engine.generate([[7]], max_new_tokens=4)  # no step of which calls anything
        assert compiled(engine).whole == 4
        with torch.no_grad():  # so that it is recorded again
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
        engine.generate([[7, 8, 9]], max_new_tokens=4)
        assert compiled(engine).whole == 7
        verified = engine.report().verified
        assert verified is not None
        assert verified.sequences == 8


def test_recordings_have_a_bound(tapes: type[WholeTapes]) -> None:
    tapes.num_bytes = compilation.MOST_BYTES + 1
    with load(build("llama")) as engine:
        seen = compiled(engine)
        assert (seen.rows, seen.num_bytes) == ((), tapes.num_bytes)
        assert "recordings take 1.1 GB, of 1.1 GB that they may" in str(seen.given_up)
        assert len(engine.generate([5, 6, 7], max_new_tokens=4)[0].token_ids) == 4


def test_the_plan_says_what_is_recorded() -> None:
    model = build("llama")
    no = "between attentions; whole decode steps are not: "
    sdpa = "attention sdpa (does not declare recordable)"
    moves = "its pools grow, and so move (with 'paged?num_tokens=…' they do not)"
    for attention, cache, told in (
        ("gathers", POOL, "whole decode steps"),
        ("sdpa", POOL, sdpa),
        ("gathers", "paged", f"cache paged ({moves})"),
        ("sdpa", "static", f"{sdpa}; cache static (does not declare recordable)"),
    ):
        names = {"attn_implementation": attention, "cache_implementation": cache}
        if told.startswith("whole"):
            plan = jackfield.plan(model, compile=BOTH, **names)
            assert f"\n  recorded: {told}\n" in str(plan)
            assert plan.to_dict()["recording"]["whole"]
        else:
            with pytest.raises(PlanError, match="cannot be recorded in whole steps"):
                jackfield.plan(model, compile=BOTH, **names)
            plan = jackfield.plan(model, compile="cuda_graph?record=between", **names)
            assert f"{no}compiler cuda_graph (record=between); " in str(plan)
            assert told in str(plan)
            assert not plan.to_dict()["recording"]["whole"]
    plan = jackfield.plan(model, compile="none", cache_implementation=POOL)
    assert plan.recording is plan.to_dict()["recording"] is None
    assert "recorded" not in str(plan)


def test_a_closed_engine_lets_go_of_its_recordings() -> None:
    engine = load(build("llama"), max_batch_size=1)
    place = weakref.ref(engine._bound.cache.inner._fixed[0])
    with torch.inference_mode():
        logits = weakref.ref(engine._bound.compiled.recorded.logits(place().step))
    engine.close()
    gc.collect()
    assert place() is None
    assert logits() is None


def test_a_model_called_by_somebody_else_before_the_first_request_says_so() -> None:
    """With as many tokens as the step has that was recorded last."""
    model = build("llama")
    with load(model, max_batch_size=2) as engine:
        rows = compiled(engine).rows
        assert rows
        for count in {*rows, 1, 3}:
            with pytest.raises(ExecutionError, match="by somebody else"), torch.no_grad():
                model(torch.arange(5, 5 + count)[None])
        assert engine.generate([[3, 4, 5]], max_new_tokens=4)[0].token_ids


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    extras.needs("triton")
    from jackfield_plugins.attention.triton import launch, variants

    if not variants.interpreted():
        pytest.skip("kernels are compiled here, for a GPU")
    monkeypatch.setattr(variants, "ready", launching(variants.ready))
    monkeypatch.setattr(variants, "overlapping", launching(variants.overlapping))
    monkeypatch.setattr(launch, "_processors", lambda _: 132)


TRITON = {"attn_implementation": "triton"}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt-oss",))]
)
def test_the_kernels_in_triton(family: str) -> None:
    """Windows, sinks, and more splits than short texts have keys for."""
    model, found = build(family), {}
    coming = [
        Arrival(n, prompt, max_new_tokens=3 + 2 * n) for n, prompt in enumerate(prompts((9, 2)))
    ]
    for compiler in ("none", BOTH):
        with load(model, compiler, max_batch_size=2, **TRITON) as engine:
            found[compiler] = tokens(drive(engine, coming))
    assert found[BOTH] == found["none"]
    assert compiled(engine).whole > 3


def told_in_a_step(engine: jackfield.Engine, patch: pytest.MonkeyPatch) -> int:
    """What `prepare` and the model tell the device in a decode step that takes no page."""
    host, counts = Host(), []

    def counted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any) -> Any:
            with host:
                return inner(*given)

        return count

    prepare = counted(engine._loop.cache.prepare)

    def first(step: Any) -> Any:
        counts.append(host.told)
        host.told = 0
        return prepare(step)

    with patch.context() as here:
        here.setattr(engine._loop.cache, "prepare", first)
        if engine._bound.compiled is None:
            here.setattr(engine._loop, "forward", counted(engine._loop.forward))
        elif recorded := engine._bound.compiled.recorded:
            here.setattr(recorded, "_run", counted(recorded._run))
        else:
            here.setattr(stretches.Stretches, "__call__", counted(stretches.Stretches.__call__))
        engine.generate([5, 6, 7, 8, 9], max_new_tokens=7)
    return min(counts[3:])


@pytest.mark.usefixtures("interpreted")
def test_what_the_host_tells_a_device_in_a_step(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of docs/compiling.md: a step that is played whole is told in a few words."""
    told: dict[str, list[int]] = {}
    for layers in (2, 3):
        model = tiny("llama", num_hidden_layers=layers)
        for how in ("none", "cuda_graph?record=between", "cuda_graph"):
            with load(model, how, max_batch_size=1, **TRITON) as engine:
                told.setdefault(how, []).append(told_in_a_step(engine, monkeypatch))
    page = (Path(__file__).parents[2] / "docs/compiling.md").read_text()
    for how, (two, three) in told.items():
        many = two + 30 * (three - two)
        assert f"| `{how}` | {many} |" in page, told
    assert told["cuda_graph"][0] == told["cuda_graph"][1]
