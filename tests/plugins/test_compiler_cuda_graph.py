"""Recorded steps give what unrecorded ones give, also when everything but the recording moved.

A tape stands in for the GPU: it notes every operation with the very tensors that it read and left,
and plays them again into the same memory, whatever Python would do by now. As with CUDA, what was
recorded has not been computed. Only the last test records with CUDA itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driven import Arrival, drive, tokens
from families import build, config_of, prompts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import jackfield
from jackfield.contracts import CompilerCapabilities
from jackfield.errors import ExecutionError, PlanError, PluginError
from jackfield.guarded import fault
from jackfield_plugins.compiler.cuda_graph import CudaGraphCompiler, graphs

CACHES = ("paged", "static", "dynamic")


class Tape(TorchDispatchMode):
    """What one function did, and in which memory."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.given: set[int] = set()  # memory that was there before
        self.made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert not func._schema.is_mutable, f"{func} changes what it is given"
        self.given |= memory((args, kwargs)) - self.made
        left = func(*args, **(kwargs or {}))
        self.made |= memory(left) - self.given
        here = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
        self.done.append((func, *here, tree_leaves(left)))
        return left

    def forget(self) -> None:
        """Leave what was made as a recording does, which computes nothing."""
        for *_, left in self.done:
            for tensor in left:
                if memory(tensor) <= self.made:
                    tensor.fill_(math.nan if tensor.is_floating_point() else 1)

    def play(self) -> None:
        for func, args, kwargs, left in self.done:
            for mine, new in zip(left, tree_leaves(func(*args, **kwargs)), strict=True):
                if mine.data_ptr() != new.data_ptr():  # a view lies where it lay
                    mine.copy_(new)


def memory(tensors: Any) -> set[int]:
    """The addresses of what the tensors are views of."""
    found = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in found}


class Tapes:
    """In the place of `CudaGraphs`. `broken`: what a recording ends with."""

    source = "tapes"
    broken: BaseException | None = None

    def __init__(self, device: torch.device) -> None:
        del device

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        if self.broken is not None:
            raise self.broken
        with Tape() as tape:
            result = run()
        tape.forget()
        return result, tape.play


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaGraphs", Tapes)
    monkeypatch.setattr(CudaGraphCompiler, "capabilities", CompilerCapabilities())
    monkeypatch.setattr(CudaGraphCompiler, "available", lambda _: [])


def load(model: Any, cache: str, compiler: str = "cuda_graph", **more: Any) -> jackfield.Engine:
    return jackfield.load(model, cache_implementation=cache, compile=compiler, **more)


def compiled(engine: jackfield.Engine) -> Any:
    return engine.report()["compiler"]


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize(
    ("family", "cache"),
    [*(("llama", cache) for cache in CACHES), ("gemma3", "paged"), ("qwen3-moe", "paged")],
)
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
    for compiler in ("none", "cuda_graph"):
        with load(model, "paged?page_size=2", compiler, decoding=decoding) as engine:
            before = engine._bound.cache.usage().pages
            found[compiler] = tokens(drive(engine, coming))
            assert engine._bound.cache.usage().pages > before
            if compiler == "cuda_graph":
                assert compiled(engine).compiled.graphs >= 3  # for 1, 2 and 4 rows
    assert found["cuda_graph"] == found["none"]


@pytest.mark.usefixtures("tapes")
def test_beams() -> None:
    model, texts, found = build("llama"), prompts((6, 11)), {}
    for compiler in ("none", "cuda_graph"):
        with load(model, "paged", compiler, decoding="beam") as engine:
            done = engine.generate(texts, num_beams=3, max_new_tokens=8)
            found[compiler] = [c.token_ids for c in done]
    assert found["cuda_graph"] == found["none"]


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
    """As much of `torch.cuda` as a recording calls, in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        for name in ("Stream", "current_stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.said.append("wait"))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def wait_stream(self, other: Any) -> None:
        assert other is self

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.said.append(f"begin {id(pool)} {capture_error_mode}")

    def capture_end(self) -> None:
        self.said.append("end")

    def replay(self) -> None:
        self.said.append("play")


def test_a_recording_is_warmed_up_and_always_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = graphs.CudaGraphs(torch.device("cuda"))

    def run() -> str:
        cuda.said.append("run")
        return "result"

    result, play = recorder.record(run)
    play()
    begin = f"begin {id(recorder._pool)} thread_local"
    assert cuda.said == ["run", "wait", begin, "run", "end", "play"]
    assert result == "result"

    def fails() -> None:
        run()
        if begin in cuda.said:
            raise RuntimeError("not permitted when stream is capturing")

    cuda.said.clear()
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(fails)
    assert cuda.said == ["run", "wait", begin, "run", "end"]


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
