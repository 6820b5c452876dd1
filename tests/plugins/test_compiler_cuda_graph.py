"""Recorded steps give what unrecorded ones give, also when everything but the recording moved.

A tape stands in for the GPU (`tape.py`). Only the last test records with CUDA itself.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from driven import Arrival, drive, tokens
from families import build, config_of, prompts
from tape import Tapes, record_on

import jackfield
from jackfield.errors import ExecutionError, PlanError, PluginError
from jackfield.guarded import fault
from jackfield_plugins.compiler.cuda_graph import graphs

CACHES = ("paged", "static", "dynamic")


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch, Tapes, whole=False)


def load(
    model: Any, cache: str, compiler: str = "cuda_graph?record=between", **more: Any
) -> jackfield.Engine:
    return jackfield.load(model, cache_implementation=cache, compile=compiler, **more)


def compiled(engine: jackfield.Engine) -> Any:
    return engine.report()["compiler"]


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize(
    ("family", "cache"),
    [*(("llama", cache) for cache in CACHES), ("gemma3", "paged"), ("qwen3-moe", "paged")],
)
@pytest.mark.one_in(5)
def test_requests_that_come_and_go(family: str, cache: str) -> None:
    model = build(family)
    if "moe" in family:
        model.float().set_experts_implementation("grouped_mm")
    coming = [
        Arrival(3 * (n % 3), prompt, max_new_tokens=3 + 2 * n)
        for n, prompt in enumerate(prompts((3, 11, 9, 20, 1, 8, 17)))
    ]
    with load(model, cache, "none", max_batch_size=5) as engine:
        expected = tokens(drive(engine, coming))
    with load(model, cache, max_batch_size=5) as engine:
        assert tokens(drive(engine, coming)) == expected
        seen = compiled(engine)
        assert 1 <= seen.compiled.graphs <= 4  # for 1, 2, 4 and 8 rows
        assert seen.compiled.seconds > 0
        assert seen.source == "tapes"
        attention = engine.report()["attention"]
        assert min(attention.decode.values()) >= seen.calls > seen.compiled.graphs


@pytest.mark.usefixtures("tapes")
def test_nothing_is_recorded_for_sizes_that_were_there() -> None:
    with load(build("llama"), "paged", max_batch_size=4) as engine:
        for rows in (1, 2, 3):
            engine.generate(prompts(tuple(range(3, 3 + rows))), max_new_tokens=5)
        assert compiled(engine).compiled.graphs == 3
        for rows in (1, 2, 3, 4):
            (done, *_) = engine.generate(prompts((30,) * rows), max_new_tokens=9)
        assert compiled(engine).compiled.graphs == 3
        assert done.report["compiler"].compiled.graphs == 0


@pytest.mark.usefixtures("tapes")
def test_drafts_are_verified_in_recorded_steps() -> None:
    texts = [[7, 8, 9, 10] * 6, [3, 4, 5] * 8, prompts((17,))[0]]
    model = build("llama")
    with load(model, "paged", "none") as engine:
        expected = [c.token_ids for c in engine.generate(texts, max_new_tokens=20)]
    with load(model, "paged", decoding="prompt_lookup") as engine:
        found = engine.generate(texts, max_new_tokens=20)
        assert [c.token_ids for c in found] == expected
        assert engine.report().speculation.accepted
        assert compiled(engine).calls


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize(
    ("family", "decoding"),
    [("llama", "prompt_lookup"), pytest.param("gemma3", "sample", marks=pytest.mark.long)],
)
def test_tables_that_change_between_steps(family: str, decoding: str) -> None:
    """Pages of two tokens are taken and given back, pools grow, rows end and another comes."""
    model = build(family)
    texts = [*prompts((30, 41)), [7, 8, 9] * 11, prompts((5,))[0]]
    coming = [Arrival(6 * n, text, max_new_tokens=30 - 4 * n) for n, text in enumerate(texts)]
    found = {}
    for compiler in ("none", "cuda_graph?record=between"):
        with load(model, "paged?page_size=2", compiler, decoding=decoding) as engine:
            before = engine._bound.cache.usage().pages
            found[compiler] = tokens(drive(engine, coming))
            assert engine._bound.cache.usage().pages > before
            if compiler != "none":
                assert compiled(engine).compiled.graphs >= 3  # for 1, 2 and 4 rows
    assert found["cuda_graph?record=between"] == found["none"]


@pytest.mark.usefixtures("tapes")
def test_beams() -> None:
    model, texts, found = build("llama"), prompts((6, 11)), {}
    for compiler in ("none", "cuda_graph?record=between"):
        with load(model, "paged", compiler, decoding="beam") as engine:
            done = engine.generate(texts, num_beams=3, max_new_tokens=8)
            found[compiler] = [c.token_ids for c in done]
    assert found["cuda_graph?record=between"] == found["none"]


@pytest.mark.usefixtures("tapes")
def test_weights_are_read_as_they_are_and_where_they_are() -> None:
    model = build("llama")
    said = []
    with load(model, "paged") as engine:
        for change in (None, "their numbers", "their place"):
            with torch.no_grad():
                if change == "their numbers":
                    model.lm_head.weight.neg_()
                elif change == "their place":
                    model.lm_head.weight.data = -model.lm_head.weight.data
            said.append(engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids)
        assert said[0] == said[2] != said[1]
        assert compiled(engine).compiled.graphs == 2  # what moved is recorded again


@pytest.mark.usefixtures("tapes")
def test_engines_side_by_side() -> None:
    models = {family: build(family) for family in ("llama", "mistral")}
    expected = {}
    for family, model in models.items():
        with load(model, "paged", "none") as engine:
            expected[family] = engine.generate([5, 6, 7], max_new_tokens=6)[0].token_ids
    with load(models["llama"], "paged") as one, load(models["mistral"], "paged") as other:
        for engine, family in ((one, "llama"), (other, "mistral"), (one, "llama")):
            (done,) = engine.generate([5, 6, 7], max_new_tokens=6)
            assert done.token_ids == expected[family]


@pytest.mark.usefixtures("tapes")
def test_what_cannot_be_recorded_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
    with load(build("llama"), "paged") as engine:
        monkeypatch.setattr(Tapes, "broken", error)
        for _ in range(2):
            with pytest.raises(ExecutionError) as caught:
                engine.generate([5, 6, 7], max_new_tokens=4)
            assert str(caught.value) == (
                f"compiler 'cuda_graph' of jackfield {jackfield.__version__}: cuda_graph cannot "
                "compile LlamaForCausalLM: CUDA error: operation not permitted when stream is "
                "capturing; load it without compile"
            )
        assert compiled(engine).compiled.graphs == 0
        monkeypatch.setattr(Tapes, "broken", None)
        assert len(engine.generate([5, 6, 7], max_new_tokens=4)[0].token_ids) == 4
        assert compiled(engine).compiled.graphs == 1


@pytest.mark.usefixtures("tapes")
def test_an_attention_that_fails_is_not_told_as_a_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with load(build("llama"), "paged") as engine:
        honest = engine._bound.compiled.attend

        def fails(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            raise fault("attention 'mine' of outside 1.0", "forward is out of ideas")

        monkeypatch.setattr(engine._bound.compiled, "attend", fails)
        said = r"^attention 'mine' of outside 1\.0: .*out of ideas"
        with pytest.raises(PluginError, match=said) as caught:
            engine.generate([5, 6, 7], max_new_tokens=4)
        assert "cannot compile" not in str(caught.value)
        monkeypatch.setattr(engine._bound.compiled, "attend", honest)
        assert len(engine.generate([5, 6, 7], max_new_tokens=4)[0].token_ids) == 4
        assert compiled(engine).compiled.graphs == 1


class FakeCuda:
    """As much of `torch.cuda` as a recording calls, in which order, on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.segments: list[dict[str, Any]] = []
        self.made = itertools.count()
        self.default = FakeStream(self, "default")
        named: dict[str, Any] = {
            "device": lambda _: contextlib.nullcontext(),
            "stream": lambda _: contextlib.nullcontext(),
            "current_stream": lambda: self.default,
            "Stream": lambda: FakeStream(self, f"stream {next(self.made)}"),
            "CUDAGraph": lambda: FakeGraph(self),
            "memory_snapshot": lambda: self.segments,
            "graph_pool_handle": lambda: f"pool {next(self.made)}",
            # It waits for all streams, and so breaks what another engine records.
            "synchronize": lambda *_: pytest.fail("waits for all streams of the device"),
        }
        for name, fake in named.items():
            monkeypatch.setattr(torch.cuda, name, fake)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self._name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.said.append(f"{self._name} waits for {other._name}")

    def synchronize(self) -> None:
        self._cuda.said.append(f"wait for {self._name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert not torch.is_inference_mode_enabled()  # tensors are made that outlive it
        self._cuda.said.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self._cuda.said.append("end")

    def replay(self) -> None:
        self._cuda.said.append("play")


def test_a_recording_is_warmed_up_and_always_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    metrics = graphs.CudaGraphs(torch.device("cuda"))
    broken = False

    def run() -> str:
        cuda.said.append("run")
        if broken and cuda.said[-2].startswith("begin"):
            raise RuntimeError("not permitted when stream is capturing")
        return "result"

    def recorded(pool: int) -> list[str]:
        own = f"stream {pool + 1}"
        begin = f"begin in pool {pool}, thread_local"
        return [f"{own} waits for default", "run", f"wait for {own}", begin, "run", "end"]

    with torch.inference_mode():
        result, play = metrics.record(run)
    play()
    assert cuda.said == [*recorded(0), "default waits for stream 1", "play"]
    assert result == "result"

    cuda.said.clear()
    broken = True
    with pytest.raises(RuntimeError, match="not permitted"):
        metrics.record(run)
    assert cuda.said == recorded(0)

    cuda.said.clear()
    broken = False
    metrics.record(run)  # in a new pool and on a new stream
    assert cuda.said == [*recorded(2), "default waits for stream 3"]


def test_what_recordings_take_is_what_their_pools_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a pool that was given up; and less, once torch has freed some."""
    cuda = FakeCuda(monkeypatch)
    one, other = (graphs.CudaGraphs(torch.device("cuda")) for _ in range(2))
    assert one.num_bytes == 0
    kept = [one.record(lambda: None)]  # in pool 0
    with pytest.raises(RuntimeError, match="broken"):
        one.record(lambda: (_ for _ in ()).throw(RuntimeError("broken")))
    kept.append(one.record(lambda: None))  # in pool 2
    kept.append(other.record(lambda: None))  # in pool 4
    sizes = {"pool 0": (5, 7), "pool 2": (11,), "pool 4": (100,), (0, 0): (1000,)}
    cuda.segments = [
        {"segment_pool_id": pool, "total_size": size} for pool, own in sizes.items() for size in own
    ]
    assert (one.num_bytes, other.num_bytes) == (23, 100)
    del cuda.segments[0]
    assert (one.num_bytes, other.num_bytes) == (18, 100)


def test_a_pool_is_not_used_again_whose_recordings_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch ends with an assertion there: "use_count > 0"."""
    cuda = FakeCuda(monkeypatch)
    one = graphs.CudaGraphs(torch.device("cuda"))
    kept = [one.record(lambda: None), one.record(lambda: None)]  # in pool 0
    del kept[0]
    kept.append(one.record(lambda: None))
    kept.clear()
    gc.collect()
    one.record(lambda: None)
    begun = [said for said in cuda.said if said.startswith("begin")]
    assert [said.partition(",")[0] for said in begun] == ["begin in pool 0"] * 3 + [
        "begin in pool 2"
    ]


def test_two_engines_record_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    inside, most = 0, 0

    def run() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    recorders = [graphs.CudaGraphs(torch.device("cuda")) for _ in range(3)]
    threads = [threading.Thread(target=one.record, args=(run,)) for one in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    captures = [said for said in cuda.said if said.startswith(("begin", "end"))]
    assert [said[:3] for said in captures] == ["beg", "end"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_a_machine_without_a_gpu() -> None:
    with pytest.raises(PlanError, match=r"cuda_graph \(needs a CUDA GPU; none is here; does not"):
        jackfield.plan(config_of("llama"), compile="cuda_graph")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("cache", CACHES)
def test_cuda_graphs_themselves(cache: str) -> None:
    model = build("llama").to("cuda", torch.float32)
    texts = prompts((3, 11, 9, 20, 1))
    with load(model, cache, "none") as engine:
        expected = [c.token_ids for c in engine.generate(texts, max_new_tokens=12)]
    with load(model, cache) as engine:
        found = [c.token_ids for c in engine.generate(texts, max_new_tokens=12)]
        assert found == expected
        assert [engine.generate(t, max_new_tokens=12)[0].token_ids for t in texts] == expected
        assert compiled(engine).compiled.graphs == 2
