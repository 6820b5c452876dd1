"""Compiled steps give what uncompiled ones give, are counted, and are never anything else.

Most tests have torch run the traced step as it is (`backend=eager`): tracing, guards, sizes and the
attention's operator are the same, and nobody waits for a C++ compiler.
"""

from __future__ import annotations

import gc
import math
import os
import re
import runpy
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Arrival, arrivals, compiled, drive, tokens
from families import build, config_of, prompts, references

import jackfield
from jackfield.errors import ExecutionError, OptionError, PlanError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield.testing.holders import through
from jackfield_plugins.compiler import inductor_lowering
from jackfield_plugins.compiler.inductor_cache import CACHE_DIR

TRACED = "inductor?backend=eager"
CACHES = ("paged", "static", "dynamic")


def load(model: Any, cache: str, compiler: str = TRACED, **more: Any) -> jackfield.Engine:
    return jackfield.load(model, cache_implementation=cache, compile=compiler, **more)


#: Each family with one cache, and sizes that are filled up with each.
QUICK = {
    ("llama", "paged", "dynamic"), ("gemma3", "static", "dynamic"),
    ("mistral", "dynamic", "dynamic"), *(("mistral", cache, "bucketed") for cache in CACHES),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "cache", "shapes"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.long)
        for cache in CACHES
        for case in (
            ("llama", cache, "dynamic"), ("gemma3", cache, "dynamic"),
            ("mistral", cache, "dynamic"), ("mistral", cache, "bucketed"),
        )
    ],
)  # fmt: skip
@pytest.mark.one_in(4)
def test_twenty_requests_get_the_same_tokens(family: str, cache: str, shapes: str) -> None:
    """Windows, chunks of prompts, rows that join (paged), idle (static) or are taken out."""
    model, coming = build(family), arrivals(20)
    limits = {"max_batch_size": 7, "prefill_chunk_size": 12}
    with load(model, cache, "none", **limits) as engine:
        expected = tokens(drive(engine, coming))
    with load(model, cache, f"{TRACED}&shapes={shapes}", **limits) as engine:
        assert tokens(drive(engine, coming)) == expected
        seen = compiled(engine)
        most = 2 if shapes == "dynamic" else 1 + math.ceil(math.log2(7))
        assert 1 <= seen.compiled.graphs <= most
        assert 0 < seen.calls < engine.report()["scheduler"].calls
        attention = engine.report()["attention"]
        assert set(attention.decode) == set(range(model.config.num_hidden_layers))
        assert min(attention.decode.values()) >= seen.calls


@pytest.mark.parametrize("cache", CACHES)
def test_nothing_is_compiled_for_sizes_that_were_there(cache: str) -> None:
    with load(build("llama"), cache, f"{TRACED}&shapes=bucketed", max_batch_size=4) as engine:
        for rows in (1, 2, 3):
            engine.generate(prompts(tuple(range(3, 3 + rows))), max_new_tokens=5)
        before = compiled(engine)
        assert before.compiled.graphs == 3  # for 1, 2 and 4 rows
        for rows in (1, 2, 3, 4):
            done = engine.generate(prompts((30,) * rows), max_new_tokens=9)
        assert compiled(engine).compiled.graphs == 3
        assert done[0].report["compiler"].compiled.graphs == 0
        assert compiled(engine).calls > before.calls


def test_engines_that_come_and_go_recompile_nothing() -> None:
    with load(build("llama"), "paged") as engine:
        engine.generate([5, 6, 7], max_new_tokens=4)
        with load(build("mistral"), "paged", attn_implementation="sdpa") as other:
            other.generate([5, 6, 7], max_new_tokens=4)
            engine.generate([5, 6, 7], max_new_tokens=4)
        engine.generate([5, 6, 7], max_new_tokens=4)
        assert compiled(engine).compiled.graphs == 1


def test_each_engine_calls_its_own_attention() -> None:
    """Of two models of one class at a time: what is compiled is the same, what runs is not."""
    with (
        load(build("llama"), "paged", attn_implementation="eager") as first,
        load(build("llama"), "paged", attn_implementation="sdpa") as second,
    ):
        for engine in (first, second, first):
            engine.generate([5, 6, 7], max_new_tokens=4)
        assert first.report()["attention"].decode == {0: 6, 1: 6}
        assert second.report()["attention"].decode == {0: 3, 1: 3}


def test_what_is_compiled_reads_the_weights_as_they_are() -> None:
    model = build("llama")
    with load(model, "paged") as engine:
        (before,) = engine.generate([5, 6, 7], max_new_tokens=8)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        (after,) = engine.generate([5, 6, 7], max_new_tokens=8)
    with load(model, "paged", "none") as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids == after.token_ids
    assert after.token_ids != before.token_ids


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("shapes", ["dynamic", "bucketed"])
@pytest.mark.one_in(4)
def test_prompts_are_compiled_where_it_is_asked_for(cache: str, shapes: str) -> None:
    model, coming = build("mistral"), arrivals(8)
    with load(model, cache, "none", max_batch_size=4) as engine:
        expected = tokens(drive(engine, coming))
    with load(model, cache, f"{TRACED}&prefill=true&shapes={shapes}", max_batch_size=4) as engine:
        assert tokens(drive(engine, coming)) == expected
        steps = engine.report()["scheduler"].calls
        assert compiled(engine).calls == steps - (cache == "dynamic")  # the first compares masks


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("shapes", ["dynamic", "bucketed"])
@pytest.mark.one_in(4)
def test_drafts_are_verified_in_compiled_steps(cache: str, shapes: str) -> None:
    texts = [[7, 8, 9, 10] * 6, [3, 4, 5] * 8, prompts((17,))[0]]
    model, common = build("llama"), {"decoding": "prompt_lookup"}
    with load(model, cache, "none", **common) as engine:
        expected = [c.token_ids for c in engine.generate(texts, max_new_tokens=20)]
    with load(model, cache, f"{TRACED}&shapes={shapes}", **common) as engine:
        found = engine.generate(texts, max_new_tokens=20)
        assert [c.token_ids for c in found] == expected
        assert engine.report().speculation.proposed
        assert compiled(engine).calls == engine.report()["scheduler"].calls - 1
        assert compiled(engine).compiled.graphs <= (4 if shapes == "dynamic" else 14)


@pytest.mark.parametrize("kernel", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_layers_of_int4_cpu(kernel: str) -> None:
    selected = {"quantization": f"int4-cpu?kernel={kernel}", "cache_implementation": "paged"}
    text = "Sort these numbers: 41 7 88"
    with jackfield.load("demo", **selected) as engine:
        (expected,) = engine.generate(text, max_new_tokens=12)
    with jackfield.load("demo", compile=TRACED, **selected) as engine:
        (found,) = engine.generate(text, max_new_tokens=12)
        assert found.token_ids == expected.token_ids
        assert compiled(engine).calls == 11


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_beams_fork_between_compiled_steps(cache: str) -> None:
    model, texts, found = build("llama"), prompts((6, 11)), {}
    for compiler in ("none", TRACED):
        with load(model, cache, compiler, decoding="beam") as engine:
            done = engine.generate(texts, num_beams=3, max_new_tokens=8)
            found[compiler] = [c.token_ids for c in done]
            assert compiled(engine).calls
    assert found[TRACED] == found["none"]


def test_an_adapter_that_is_switched() -> None:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    model = build("llama")
    torch.manual_seed(0)  # of some draws the text says nothing
    model.add_adapter(
        peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    found = {}
    for compiler in ("none", TRACED):
        with load(model, "paged", compiler) as engine:
            said = []
            for switch in (engine.enable_adapter, engine.disable_adapter, engine.enable_adapter):
                switch()
                said.append(engine.generate([5, 6, 7], max_new_tokens=6)[0].token_ids)
            found[compiler] = said
            graphs = compiled(engine).compiled
    assert found[TRACED] == found["none"]
    assert said[0] != said[1]
    assert graphs.graphs == 2  # with it and without; torch keeps both


def test_prompts_of_one_token() -> None:
    for cache in CACHES:
        with load(build("llama"), cache, "none") as engine:
            (expected,) = engine.generate([[5]], max_new_tokens=6)
        with load(build("llama"), cache) as engine:
            assert engine.generate([[5]], max_new_tokens=6)[0].token_ids == expected.token_ids


def test_the_report_says_what_was_compiled() -> None:
    with load(build("llama"), "paged") as engine:
        (done,) = engine.generate([5, 6, 7], max_new_tokens=4)
        row = done.report.to_dict()["compiler"]
        assert (row["name"], row["calls"], row["compiled"]["graphs"]) == ("inductor", 3, 1)
        assert row["compiled"]["seconds"] > 0
        assert row["source"] == f"torch {torch.__version__}, eager"
        assert "3 calls, 1 graphs compiled in" in str(done.report)
        assert "compiler: inductor?backend=eager (named)" in engine.explain()
    with load(build("llama"), "paged", "none") as engine:
        (done,) = engine.generate([5, 6, 7], max_new_tokens=4)
        assert "compiled" not in done.report.to_dict()["compiler"]


def test_a_model_that_cannot_be_traced_fails_in_one_line_each_time() -> None:
    model = build("llama")
    whole = model.model.norm.forward

    def breaks(states: torch.Tensor) -> torch.Tensor:
        if states.sum() > 1e9:  # depends on numbers, which are not there while it is traced
            return states
        return whole(states)

    model.model.norm.forward = breaks
    with load(model, "paged") as engine:
        for _ in range(2):
            with pytest.raises(ExecutionError) as caught:
                engine.generate([5, 6, 7], max_new_tokens=4)
            text = str(caught.value)
            assert "' of jackfield " in text
            assert "inductor cannot compile LlamaForCausalLM: Data-dependent" in text
            assert text.endswith("; load it without compile")
            assert "\n" not in text
        (done,) = engine.generate([5, 6, 7], max_new_tokens=1)  # its prompt is not compiled
        assert len(done.token_ids) == 1
        assert compiled(engine).compiled.graphs == 0
        del model.model.norm.forward
        assert len(engine.generate([5, 6, 7], max_new_tokens=4)[0].token_ids) == 4
        assert compiled(engine).compiled.graphs == 1


@pytest.mark.parametrize("cache", ["paged", "static"])
def test_nothing_runs_uncompiled_without_a_word(cache: str) -> None:
    with load(build("llama"), cache) as engine:
        torch.compiler.set_stance("force_eager")
        try:
            with pytest.raises(
                ExecutionError, match="a step runs uncompiled that was to be compiled"
            ):
                drive(engine, [Arrival(0, [5, 6, 7], max_new_tokens=4)])
        finally:
            torch.compiler.set_stance("default")
        engine._loop.reset()
        assert tokens(drive(engine, [Arrival(0, [5, 6, 7], max_new_tokens=4)]))


def test_what_the_collector_runs_is_not_compiled() -> None:
    """A finalizer with an operation, as soon as torch's own code is interrupted for one."""
    entered = []

    def finalizes(phase: str, _: Any) -> None:
        frame = sys._getframe(1)
        if phase == "start" and frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            entered.append(doubled())

    def doubled() -> torch.Tensor:
        return torch.ones(3) * 2

    with load(build("llama"), "paged") as engine:
        engine.generate([5, 6, 7], max_new_tokens=4)
        usual = gc.get_threshold()
        gc.collect()
        gc.callbacks.append(finalizes)
        gc.set_threshold(1, 10**6, 10**6)
        try:
            engine.generate([5, 6, 7], max_new_tokens=12)
        finally:
            gc.set_threshold(*usual)
            gc.callbacks.remove(finalizes)
        assert gc.isenabled()
        assert compiled(engine).compiled.graphs == 1
        assert not entered


def test_a_compiled_step_belongs_to_its_engine() -> None:
    from jackfield.bridge import opaque

    states = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ExecutionError, match="somebody else than its engine"):
        opaque._operator(states, states, states, 0, *[None] * len(opaque._TRAVEL))


def test_masks_that_only_the_model_makes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral")

    def wrong(**arguments: Any) -> torch.Tensor:
        rows, width, _ = arguments["inputs_embeds"].shape
        return torch.ones(rows, 1, width, width, dtype=torch.bool)

    monkeypatch.setattr(model, "create_masks_for_generate", wrong, raising=False)
    with (
        load(model, "dynamic") as engine,
        pytest.raises(ExecutionError, match="layer 0 of this model gets a mask that only its own"),
    ):
        engine.generate(prompts((12,)), max_new_tokens=4)


def test_an_engine_that_was_closed_leaves_nothing_behind() -> None:
    model = build("llama")
    with load(model, "paged") as engine:
        engine.generate([5, 6, 7], max_new_tokens=4)
    seen = weakref.ref(engine)
    implementation = model.config._attn_implementation
    del engine
    gc.collect()
    assert seen() is None
    assert implementation == "eager"
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).shape == (1, 7)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None, through(kept())


@pytest.mark.parametrize(
    ("family", "arguments", "reason"),
    [
        ("llama", {"deterministic": True}, "is not batch-invariant"),
        ("llama", {"cache_implementation": "offloaded"}, "not known to work with steps that are"),
        ("falcon-alibi", {}, "cannot take the model's own attention out"),
        ("llama", {"kernels": "triton-rms-norm"}, "cannot be traced, and steps are"),
        ("lfm2", {}, "cannot take the state of linear-attention layers out"),
        ("diffllama", {}, "needs one attention call for each cached layer"),
        ("mixtral", {"dtype": "float64"}, "needs experts in a grouped product"),
        ("deepseek-v3", {"cache_implementation": "dynamic"}, "keeps less than the attention reads"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    family: str, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        jackfield.plan(config_of(family), compile="inductor", **arguments)


def test_experts_that_a_live_model_computes_one_by_one_are_refused_before_a_step() -> None:
    model = build("mixtral", torch.float32)
    with pytest.raises(PlanError, match="grouped product, which is switched off in the live"):
        jackfield.plan(model, compile=TRACED)
    assert "experts: eager, since" in str(jackfield.plan(model))
    model.set_experts_implementation("grouped_mm")
    with load(model, "paged", "none") as engine:
        (expected,) = engine.generate([5, 6, 7], max_new_tokens=6)
    with load(model, "paged") as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=6)[0].token_ids == expected.token_ids


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlanError, match=r"inductor \(needs a C\+\+ compiler and finds none"):
        jackfield.plan(config_of("llama"), compile="inductor", attn_implementation="sdpa")
    jackfield.plan(config_of("llama"), compile=TRACED, attn_implementation="sdpa")


def test_a_python_that_torch_does_not_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported() -> None:
        raise RuntimeError("Python 3.99+ not yet supported for torch.compile\nmore")

    monkeypatch.setattr("torch._dynamo.eval_frame.check_if_dynamo_supported", unsupported)
    with pytest.raises(PlanError, match=r"\(Python 3\.99\+ not yet supported for torch.compile\)"):
        jackfield.plan(config_of("llama"), compile=TRACED)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("inductor?shapes=wide", "shapes"),
        ("inductor?backend=cudagraphs", "backend"),
        ("inductor?prefill=maybe", "prefill"),
        ("inductor?backend=eager&mode=max-autotune-no-cudagraphs", "mode is inductor's"),
        ("inductor?graphs=3", "no option 'graphs'"),
    ],
)
def test_bad_options(selection: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        jackfield.plan("demo", compile=selection)


def test_a_compiler_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "c++"
    broken.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) exec g++ --version;; esac\n'
        'echo "step.cpp:7: error: out of ideas" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CACHE_DIR, raising=False)
    with load(build("llama"), "paged", "inductor", attn_implementation="sdpa") as engine:
        with pytest.raises(ExecutionError) as caught:
            engine.generate([5, 6, 7], max_new_tokens=4)
        text = str(caught.value)
        assert "inductor cannot compile LlamaForCausalLM: " in text
        assert "step.cpp:7: error: out of ideas" in text
        assert "\n" not in text


def test_a_bucket_is_the_next_power_of_two() -> None:
    from jackfield_plugins.compiler.inductor import InductorOptions

    bucketed = inductor_lowering.InductorCompilation(InductorOptions(shapes="bucketed"), "Model")
    assert [bucketed.fill(n) for n in (1, 2, 3, 4, 5, 31, 32, 33)] == [1, 2, 4, 4, 8, 32, 32, 64]
    dynamic = inductor_lowering.InductorCompilation(InductorOptions(), "Model")
    assert [dynamic.fill(n) for n in (1, 3, 33)] == [1, 3, 33]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cache", ["paged", "static"])
def test_inductor_itself(cache: str) -> None:
    model, coming = build("qwen3"), arrivals(12)
    with load(model, cache, "none", max_batch_size=4) as engine:
        expected = tokens(drive(engine, coming))
    with load(model, cache, "inductor", max_batch_size=4) as engine:
        assert tokens(drive(engine, coming)) == expected
        assert compiled(engine).compiled.graphs == (2 if cache == "paged" else 1)  # rows idle


FRESH = """
import sys, jackfield
from torch._dynamo.utils import counters
sys.path.insert(0, sys.argv[1])
from families import build
with jackfield.load(build("llama"), cache_implementation="paged", compile="inductor") as engine:
    (done,) = engine.generate([5, 6, 7], max_new_tokens=8)
    made = engine.report()["compiler"].compiled
hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
print(made.graphs, made.seconds, hits, *done.token_ids)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop(CACHE_DIR, None)
    families = str(Path(__file__).parent.parent / "conformance")
    runs = [
        subprocess.run(
            [sys.executable, "-c", FRESH, families],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    (cold, warm) = runs
    assert (cold[0], cold[2]) == ("1", "0")
    assert int(warm[2]) >= 1
    assert float(warm[1]) < float(cold[1])
    assert warm[3:] == cold[3:]


@pytest.mark.long
def test_ten_engines_with_the_compiler_of_the_guide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch gives up where one code object was compiled eight times; each engine has its own."""
    page = Path(__file__).parents[2] / "docs" / "writing-a-plugin.md"
    modules = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (source,) = (text for text in modules if "class Trace(" in text)
    (tmp_path / "traced.py").write_text(source)
    scope = runpy.run_path(str(tmp_path / "traced.py"))
    mine = Registered(scope["jackfield_compiler"]()[0], "outside", "1.0", "ep")
    monkeypatch.setitem(registry().backends, "compiler", [*registry().backends["compiler"], mine])
    model = build("llama")
    expected = references("llama", (5,), 3)
    for _ in range(10):
        with jackfield.load(model, compile="traced", cache_implementation="paged") as engine:
            (found,) = engine.generate(prompts((5,)), max_new_tokens=3)
            compiled = engine.report()["compiler"].compiled
        assert [found.token_ids] == expected
        assert compiled is not None
        assert compiled.graphs >= 1


def test_what_another_engine_compiles_is_not_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's word for it is one of the whole process."""
    model = build("llama", torch.float32)
    arguments: Any = {"compile": "inductor?backend=eager", "cache_implementation": "paged"}
    with jackfield.load(model, **arguments) as engine:
        expected = [c.token_ids for c in engine.generate(prompts((5, 9)), max_new_tokens=5)]
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        found = [c.token_ids for c in engine.generate(prompts((5, 9)), max_new_tokens=5)]
    assert found == expected
