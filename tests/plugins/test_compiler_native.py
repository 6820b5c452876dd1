"""Native steps give what uncompiled ones give, and are made anew where they no longer hold."""

from __future__ import annotations

import copy
import functools
import math
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from driven import arrivals, compiled, drive, tokens
from families import FAMILIES, build, prompts
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import jackfield
from jackfield.bridge.meta_model import meta_model
from jackfield.demo import MODEL_PATH
from jackfield.errors import ExecutionError, PlanError
from jackfield_plugins.compiler.native import kept, warmed
from jackfield_plugins.compiler.native.graph import Graph
from jackfield_plugins.compiler.torch_code import own_name
from jackfield_plugins.native import keeping

if TYPE_CHECKING:
    from command_line import Cli
    from forking import Forks

REFUSED = {"falcon-alibi"}


def load(model: Any, cache: str = "paged", compiler: str = "native", **more: Any) -> Any:
    return jackfield.load(model, cache_implementation=cache, compile=compiler, **more)


def programs(engine: jackfield.Engine) -> dict[tuple[int, int], Any]:
    return engine._bound.compiled.compilation._programs


def keep_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (kept, warmed):
        monkeypatch.setattr(module, "cache_root", lambda: keeping.own_folder(folder))
    return folder / "native-graphs"


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("common") / "cache"


@pytest.fixture(autouse=True)
def _shared(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are kept for this module: tracing is most of what its tests take."""
    keep_in(common, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Graphs are kept for this test alone."""
    return keep_in(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize(
    ("family", "cache"),
    [("gemma3", "paged"), ("llama", "static"), ("mistral", "dynamic"), ("phi3", "paged")],
)
@pytest.mark.one_in(4)
def test_twenty_requests_get_the_same_tokens(family: str, cache: str) -> None:
    """Windows, chunks of prompts, rows that join (paged), idle (static) or are taken out."""
    model, coming = build(family), arrivals(20)
    limits = {"max_batch_size": 7, "prefill_chunk_size": 12}
    with load(model, cache, "none", **limits) as engine:
        expected = tokens(drive(engine, coming))
    with load(model, cache, **limits) as engine:
        assert tokens(drive(engine, coming)) == expected
        seen = compiled(engine)
        assert 1 <= seen.compiled.graphs <= 1 + math.ceil(math.log2(7))
        assert 0 < seen.calls < engine.report()["scheduler"].calls
        attention = engine.report()["attention"]
        assert set(attention.decode) == set(range(model.config.num_hidden_layers))
        assert min(attention.decode.values()) >= seen.calls


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED))
@pytest.mark.one_in(4)
def test_every_family_says_the_same(family: str) -> None:
    """In float32, which experts need; most other tests run float64."""
    model, texts = build(family, torch.float32), prompts((5, 9, 3))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    found = []
    for compiler in ("none", "native"):
        with load(model, "paged", compiler) as engine:
            found.append([c.token_ids for c in engine.generate(texts, max_new_tokens=8)])
            assert compiled(engine).calls == 7 + (compiler == "none")
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.one_in(2)
def test_drafts_are_verified_in_native_steps(cache: str) -> None:
    texts = [[7, 8, 9, 10] * 6, [3, 4, 5] * 8, prompts((17,))[0]]
    model, common = build("llama"), {"decoding": "prompt_lookup"}
    with load(model, cache, "none", **common) as engine:
        expected = [c.token_ids for c in engine.generate(texts, max_new_tokens=20)]
    with load(model, cache, **common) as engine:
        found = engine.generate(texts, max_new_tokens=20)
        assert [c.token_ids for c in found] == expected
        assert engine.report().speculation.proposed
        assert compiled(engine).calls == engine.report()["scheduler"].calls - 1


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_beams_fork_between_native_steps(cache: str) -> None:
    model, texts, found = build("llama"), prompts((6, 11)), {}
    for compiler in ("none", "native"):
        with load(model, cache, compiler, decoding="beam") as engine:
            done = engine.generate(texts, num_beams=3, max_new_tokens=8)
            found[compiler] = [c.token_ids for c in done]
            assert compiled(engine).calls
    assert found["native"] == found["none"]


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.one_in(2)
def test_layers_of_int4_cpu(kernel: str) -> None:
    selected = {"quantization": f"int4-cpu?kernel={kernel}", "cache_implementation": "paged"}
    text = "Sort these numbers: 41 7 88"
    with jackfield.load("demo", **selected) as engine:
        (expected,) = engine.generate(text, max_new_tokens=12)
    with jackfield.load("demo", compile="native", **selected) as engine:
        (found,) = engine.generate(text, max_new_tokens=12)
        assert found.token_ids == expected.token_ids
        assert compiled(engine).calls == 11
        (program,) = programs(engine).values()
        assert bool(program.python) == (kernel == "torch")
        missing = "; in Python: jackfield.groupwise_linear.default"
        assert engine.report()["compiler"].source.endswith(missing) == (kernel == "torch")


def test_a_step_is_one_call_and_its_attentions_are_counted() -> None:
    with load("demo", dtype="bfloat16") as engine:
        calls = []
        engine.generate("Once upon a time", max_new_tokens=2)
        (program,) = programs(engine).values()
        assert not program.python
        forward = engine._bound.compiled
        attend = forward.attend
        forward.attend = lambda *a, **k: calls.append(1) or attend(*a, **k)
        before = engine.report()["attention"].decode
        engine.generate("Once upon a time", max_new_tokens=6)
        after = engine.report()["attention"].decode
        assert not calls  # Python's way to the attention is not taken
        assert {layer: after[layer] - before[layer] for layer in after} == dict.fromkeys(after, 5)


def test_an_attention_without_a_native_form_is_called_from_python() -> None:
    found = {}
    for attention in ("sdpa", "cpu_decode"):
        with load(build("llama"), attn_implementation=attention) as engine:
            found[attention] = engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids
            assert engine.report()["attention"].decode == {0: 7, 1: 7}
            told = engine.report()["compiler"].source.endswith(
                "the attention of 7 of 7 steps that decode"
            )
            assert told == (attention == "sdpa")
    assert found["sdpa"] == found["cpu_decode"]


def test_an_adapter_that_is_switched() -> None:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    model = build("llama")
    torch.manual_seed(0)  # of some draws the text says nothing
    model.add_adapter(
        peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    found = {}
    for compiler in ("none", "native"):
        with load(model, "paged", compiler) as engine:
            said = []
            for switch in (engine.enable_adapter, engine.disable_adapter, engine.enable_adapter):
                switch()
                said.append(engine.generate([5, 6, 7], max_new_tokens=6)[0].token_ids)
            found[compiler] = said
    assert found["native"] == found["none"]
    assert said[0] != said[1]


def test_an_adapter_whose_scale_is_changed() -> None:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    found = {}
    for compiler in ("none", "native"):
        model = copy.deepcopy(build("llama"))
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        with load(model, "paged", compiler) as engine:
            engine.enable_adapter()
            said = [engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids]
            for layer in model.model.layers:
                layer.self_attn.q_proj.set_scale("default", 40.0)
            said.append(engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids)
        found[compiler] = said
    assert found["native"] == found["none"]
    assert said[0] != said[1]


def negated(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.neg_()


def moved(model: Any) -> None:
    model.lm_head.weight.data = -model.lm_head.weight.data


def replaced(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def another_module(model: Any) -> None:
    old, model.lm_head = model.lm_head, torch.nn.Linear(32, 120, bias=False, dtype=torch.float64)
    model.lm_head.weight = torch.nn.Parameter(-old.weight.detach())


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: -output)


def patched(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: -own(states)


def retyped(model: Any) -> None:
    class Negated(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return -super().forward(states)

    model.lm_head.__class__ = Negated


def turned(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        weight.data = weight.data.t()


def rescaled(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.7


CHANGES = (negated, rescaled, moved, turned, replaced, another_module, hooked, patched, retyped)


def another_method(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: -own(self, x))


def another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.apply_rotary_pos_emb
    other = lambda q, k, cos, sin: own(q, k, -cos, sin)  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)


def a_hook_of_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    monkeypatch.setitem(
        hooks, -1, lambda m, _, out: -out if isinstance(m, modeling_llama.LlamaRMSNorm) else None
    )


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_is_changed_while_an_engine_runs_it(change: Any) -> None:
    model = build("llama").__class__(build("llama").config).double()
    with load(model) as engine:
        (before,) = engine.generate([5, 6, 7], max_new_tokens=8)
        change(model)
        (after,) = engine.generate([5, 6, 7], max_new_tokens=8)
    with load(model, "paged", "none") as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids == after.token_ids
    assert after.token_ids != before.token_ids


@pytest.mark.parametrize("change", [another_method, another_function, a_hook_of_all_modules])
def test_code_that_somebody_puts_in_the_place_of_a_models(
    change: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an engine runs, and where a graph of the model as it was is on disk."""
    model = build("llama")
    with load(model) as engine:
        (before,) = engine.generate([5, 6, 7], max_new_tokens=8)
        change(monkeypatch)
        (after,) = engine.generate([5, 6, 7], max_new_tokens=8)
    with load(model, "paged", "none") as engine:
        expected = engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids
    assert expected == after.token_ids != before.token_ids
    with load(build("llama")) as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids == expected


def rolled(own: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return found.roll(1, -1) if isinstance(found, torch.Tensor) else found

    return call


#: what a step calls of torch
TORCHS = {
    "silu": F, "linear": F, "embedding": F, "rsqrt": torch, "cat": torch, "pow": torch.Tensor,
    "cos": torch.Tensor, "forward": nn.Linear, "__call__": nn.Module,
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", TORCHS)
def test_code_that_somebody_puts_in_the_place_of_torchs(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with a graph of torch as it is, nor as one that a later process would read."""
    owner = TORCHS[name]
    with load(build("llama")) as engine, load(build("llama"), "paged", "none") as plain:
        (before,) = engine.generate([5, 6, 7], max_new_tokens=8)
        with monkeypatch.context() as patching:
            patching.setattr(owner, name, rolled(getattr(owner, name)))
            for _ in range(2):
                with pytest.raises(ExecutionError, match=rf"\.{name} is not torch's own"):
                    engine.generate([5, 6, 7], max_new_tokens=8)
            plain.generate([5, 6, 7], max_new_tokens=8)
            with load(build("llama")) as other, pytest.raises(ExecutionError, match="torch's own"):
                other.generate([5, 6, 7], max_new_tokens=8)
        (after,) = engine.generate([5, 6, 7], max_new_tokens=8)
    with load(build("llama")) as other:
        assert other.generate([5, 6, 7], max_new_tokens=8)[0].token_ids == before.token_ids
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize("wrapped", [torch.no_grad(), torch.compiler.disable])
def test_a_decorator_of_torchs_makes_no_function_torchs(wrapped: Any) -> None:
    assert own_name(wrapped(rolled(F.silu))) is None
    assert own_name(F.silu) == "torch.nn.functional.silu"


def test_one_of_torchs_functions_in_the_place_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    with load(model) as engine:
        (before,) = engine.generate([5, 6, 7], max_new_tokens=8)
        monkeypatch.setattr(F, "silu", F.relu)
        (after,) = engine.generate([5, 6, 7], max_new_tokens=8)
    with load(model, "paged", "none") as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids == after.token_ids
    assert after.token_ids != before.token_ids


def expanded(weight: Any) -> torch.Tensor:
    return weight[:1].expand_as(weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "view", [expanded, lambda weight: weight.as_strided(weight.shape, (1, len(weight)))]
)
def test_another_view_of_the_same_memory(view: Callable[[Any], torch.Tensor]) -> None:
    model = build("llama")
    with load(model) as engine:
        before = engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids
        weight = model.model.layers[0].mlp.gate_proj.weight
        weight.data = view(weight.data)
        after = engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids
    with load(model, "paged", "none") as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids == after != before


def test_a_hook_in_the_place_of_another() -> None:
    model, said = build("llama").__class__(build("llama").config).double(), []
    with load(model) as engine:
        for sign in (1, -1):
            hook = model.lm_head.register_forward_hook(lambda m, _, out, sign=sign: sign * out)
            said.append(engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids)
            hook.remove()
    assert said[0] != said[1]


def test_engines_of_several_threads_trace_one_after_another(folder: Path) -> None:
    models = [copy.deepcopy(build("llama")) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        said = [one[0] for one in threads.map(generate, models)]
    assert said == [said[0]] * 3


def test_no_model_is_built_while_another_is_traced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own variables say that somebody traces, to all threads."""
    export, begun, ended = torch.export.export, threading.Event(), threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        time.sleep(0.5)
        found = export(*args, **kwargs)
        ended.set()
        return found

    monkeypatch.setattr(torch.export, "export", slowly)
    with ThreadPoolExecutor(1) as threads:
        said = threads.submit(generate, copy.deepcopy(build("llama")))
        assert begun.wait(60)
        meta_model(build("llama").config)
        assert ended.is_set()
        assert said.result()


def test_what_python_reads_from_a_tensor_is_in_no_graph() -> None:
    model = build("llama").__class__(build("llama").config).double()
    model.model.norm.register_buffer("most", torch.tensor(0.5, dtype=torch.float64))
    whole = model.model.norm.forward
    model.model.norm.forward = lambda states: whole(states).clamp(max=model.model.norm.most.item())
    with load(model) as engine, pytest.raises(ExecutionError, match="Python reads what is in a"):
        engine.generate([5, 6, 7], max_new_tokens=4)


@pytest.mark.parametrize("offset", [None, 0, 32])
def test_a_view_by_its_place_in_memory(offset: int | None) -> None:
    """In a program, values lie in one piece of memory."""
    model = build("llama").__class__(build("llama").config).double()
    whole = model.model.norm.forward

    def forward(states: torch.Tensor) -> torch.Tensor:
        both = torch.cat([-whole(states), whole(states)], 1)
        return both.as_strided(states.shape, both.stride(), offset)

    model.model.norm.forward = forward
    with load(model, "paged", "none") as engine:
        expected = engine.generate([5, 6], max_new_tokens=4)
    with load(model) as engine:
        if offset:
            with pytest.raises(ExecutionError, match="reads a tensor from elsewhere in memory"):
                engine.generate([5, 6], max_new_tokens=4)
        else:
            found = engine.generate([5, 6], max_new_tokens=4)
            assert found[0].token_ids == expected[0].token_ids


def test_how_steps_are_filled_up() -> None:
    with load(build("llama")) as engine:
        fill = engine._bound.compiled.compilation.fill
        filled = [fill(count) for count in range(1, 1025)]
    assert all(count <= found < 2 * count for count, found in enumerate(filled, 1))
    assert all(found <= 1.25 * count for count, found in enumerate(filled, 1) if count > 32)
    assert all(fill(found) == found for found in filled)
    assert sorted(set(filled))[:12] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80]


def test_a_thread_count_that_changes() -> None:
    usual = torch.get_num_threads()
    try:
        with load(build("llama")) as engine:
            said = []
            for threads in (1, 2, 3, 1):
                torch.set_num_threads(threads)
                said.append(engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids)
            assert compiled(engine).compiled.graphs == 1  # laid out anew, not traced
    finally:
        torch.set_num_threads(usual)
    assert said == [said[0]] * 4


def test_two_engines_take_turns() -> None:
    with load(build("llama")) as first, load(build("mistral")) as second:
        turns = [
            engine.generate([5, 6, 7], max_new_tokens=6)[0].token_ids
            for engine in (first, second, first, second)
        ]
        assert turns[:2] == turns[2:]
        assert compiled(first).compiled.graphs == compiled(second).compiled.graphs == 1


def test_an_engine_that_was_closed_leaves_nothing_behind() -> None:
    with load(build("llama")) as engine:
        engine.generate([5, 6, 7], max_new_tokens=4)
        (program,) = map(weakref.ref, programs(engine).values())
    del engine
    assert program() is None


def test_a_model_that_cannot_be_traced_fails_in_one_line_each_time() -> None:
    model = build("llama")
    whole = model.model.norm.forward

    def breaks(states: torch.Tensor) -> torch.Tensor:
        if states.sum() > 1e9:  # depends on numbers, which are not there while it is traced
            return states
        return whole(states)

    model.model.norm.forward = breaks
    try:
        with load(model) as engine:
            for _ in range(2):
                with pytest.raises(ExecutionError) as caught:
                    engine.generate([5, 6, 7], max_new_tokens=4)
                text = str(caught.value)
                assert "native cannot trace LlamaForCausalLM: " in text
                assert text.endswith("; load it without compile")
                assert "\n" not in text
            del model.model.norm.forward
            assert len(engine.generate([5, 6, 7], max_new_tokens=4)[0].token_ids) == 4
    finally:
        vars(model.model.norm).pop("forward", None)


@pytest.mark.parametrize(
    ("family", "arguments", "reason"),
    [
        ("llama", {"deterministic": True}, "is not batch-invariant"),
        ("llama", {"cache_implementation": "offloaded"}, "not known to work with steps that are"),
        ("falcon-alibi", {}, "cannot take the model's own attention out"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    family: str, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        jackfield.load(build(family), **{"compile": "native", **arguments})


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlanError, match="needs a C\\+\\+ compiler"):
        load(build("llama"))


# -- graphs on disk


def generate(model: Any) -> tuple[list[int], int]:
    """What is said, and how often a step was traced."""
    from jackfield_plugins.compiler.native import compilation

    traced = []
    whole = compilation.trace

    def counted(*args: Any) -> Graph:
        traced.append(args)
        return whole(*args)

    compilation.trace = counted  # type: ignore[assignment]
    try:
        with load(model) as engine:
            return engine.generate([5, 6, 7], max_new_tokens=6)[0].token_ids, len(traced)
    finally:
        compilation.trace = whole


def test_a_graph_is_traced_once(folder: Path) -> None:
    said, traced = generate(build("llama"))
    assert traced == 1
    assert generate(build("llama")) == (said, 0)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_graph_is_of_a_model_wherever_its_files_are(tmp_path: Path) -> None:
    shutil.copytree(MODEL_PATH, tmp_path / "elsewhere")
    keys = {
        kept.KeptGraphs(AutoModelForCausalLM.from_pretrained(place))._key
        for place in (MODEL_PATH, tmp_path / "elsewhere")
    }
    assert len(keys) == 1


def test_a_graph_is_of_one_model_only(folder: Path) -> None:
    generate(build("llama"))
    other = build("llama").__class__(build("llama").config).double()
    assert generate(other)[1] == 0  # other numbers, the same shape
    for name, value in (("attention_dropout", 0.25), ("scaling", 0.5), ("layer_idx", 1)):
        changed = build("llama").__class__(build("llama").config).double()
        setattr(changed.model.layers[0].self_attn, name, value)
        assert kept.KeptGraphs(changed)._key != kept.KeptGraphs(other)._key
    changed = build("llama").__class__(build("llama").config).float()
    assert kept.KeptGraphs(changed)._key != kept.KeptGraphs(other)._key
    assert kept.KeptGraphs(build("mistral"))._key != kept.KeptGraphs(other)._key


class Kinds(Enum):
    ONE, TWO = 1, 2


class Settings:
    def __init__(self, size: int) -> None:
        self.size, self.itself = size, self


@dataclass(slots=True)
class Slotted:
    size: int


def scaled(by: int) -> Any:
    return lambda x: x * by


OTHERS = [
    (torch.float32, torch.bfloat16), (Kinds.ONE, Kinds.TWO), (Settings(1), Settings(2)),
    (scaled(1), scaled(2)), (lambda x: x + 1, lambda x: x - 1),
    (functools.partial(torch.mul, other=1), functools.partial(torch.mul, other=2)),
    (torch.sin, torch.cos), (np.float32(1), np.float32(2)), (np.arange(2), np.arange(1, 3)),
    (Slotted(1), Slotted(2)), ([nn.LeakyReLU(0.1)], [nn.LeakyReLU(0.2)]),
    ([nn.Dropout(0.1).train()], [nn.Dropout(0.1).eval()]),
    (torch.ops.aten.sin.default, torch.ops.aten.cos.default),
    (torch.tensor(1.0), torch.tensor(2.0)), ({(1, 2): 3, "a": 4}, {(1, 2): 3, "a": 5}),
    ([Settings(1)], [Settings(2)]), ({1, 2}, {1, 3}), (1, True), (1j, 2j), ("\ud800", "\ud801"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), OTHERS, ids=lambda value: type(value).__name__)
def test_a_setting_of_any_kind_tells_graphs_apart(one: Any, other: Any) -> None:
    keys = []
    for value in (one, copy.deepcopy(one), other):
        model = copy.deepcopy(build("llama"))
        model.model.norm.setting = value
        keys.append(kept.KeptGraphs(model)._key)
    assert keys[0] == keys[1] != keys[2]


def tied_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def shared_between_layers(model: Any) -> None:
    first, second = model.model.layers[:2]
    second.mlp.gate_proj.weight = first.mlp.gate_proj.weight


def a_shared_part(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def trained(model: Any) -> None:
    model.model.layers[0].train()


def trained_within(model: Any) -> None:
    model.model.norm.inner = [nn.Dropout(0.5).train()]


@pytest.mark.parametrize(
    "change", [tied_by_hand, shared_between_layers, a_shared_part, trained, trained_within]
)
def test_what_a_model_is_tells_graphs_apart(change: Any) -> None:
    made = build("llama").__class__(build("llama").config).double().eval()
    before = kept.KeptGraphs(made)._key
    change(made)
    assert kept.KeptGraphs(made)._key != before


def test_a_value_that_nobody_can_read_is_in_no_key() -> None:
    for value in (iter([1]), memoryview(b"1"), [threading.Lock()], weakref.ref(build("llama"))):
        made = copy.deepcopy(build("llama"))
        made.model.norm.odd = value
        assert kept.KeptGraphs(made)._key is None


def test_requests_come_while_a_step_is_traced(folder: Path) -> None:
    model = build("llama").__class__(build("llama").config).double().eval()
    with load(model) as engine:
        first = engine.submit([5, 6, 7], max_new_tokens=4)
        others = []
        while not first.done:
            others.append(engine.submit([8, 9], max_new_tokens=1))
            time.sleep(0.01)
        assert [len(one.result().token_ids) for one in others] == [1] * len(others)
        assert len(others) > 3


def test_a_graph_that_has_no_form_on_disk_is_traced_by_each_process(folder: Path) -> None:
    class Turned(modeling_llama.LlamaRMSNorm):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(super().forward(states).unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * (1 + 0.5j)).flatten(-2)

    model = copy.deepcopy(build("llama"))
    model.model.norm.__class__ = Turned
    said, traced = generate(model)
    assert (len(said), traced) == (6, 1)
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("cut", [0, 1, 31, 40, -1])
@pytest.mark.one_in(4)
def test_a_graph_that_was_cut_off_is_traced_anew(
    folder: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    said, _ = generate(build("llama"))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    assert generate(build("llama")) == (said, 1)
    assert "is traced anew" in caplog.text
    assert file.read_bytes() == whole


def test_a_graph_of_somebody_else_is_not_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Changed bytes, and the whole graph of another size under this one's name."""
    said, _ = generate(build("llama"))
    (file,) = folder.iterdir()
    whole = bytearray(file.read_bytes())
    for at in (10, len(whole) // 2, len(whole) - 3):
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert generate(build("llama")) == (said, 1)
    other = file.with_name(file.name.replace("1x1", "1x2"))
    other.write_bytes(whole)
    assert "damaged, or was changed" in caplog.text
    assert kept.KeptGraphs(build("llama")).read(1, 2) is None


def test_a_folder_that_cannot_be_written_costs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not folder.exists()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "keep", full)
    said, traced = generate(build("llama"))
    assert (len(said), traced) == (6, 1)
    assert "No space left on device" in caplog.text


def test_a_folder_that_others_can_write_is_not_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(build("llama"))
    folder.chmod(0o777)
    assert generate(build("llama"))[1] == 1
    assert "others can write to" in caplog.text


def test_a_module_with_an_attribute_that_cannot_be_told_is_traced_by_each(folder: Path) -> None:
    class Silent(int):
        def __repr__(self) -> str:
            raise TypeError("it has no text")

    model = build("llama").__class__(build("llama").config).double()
    model.lm_head.places = {(1, 2): 3}
    assert [generate(model)[1], generate(model)[1]] == [1, 0]
    model.lm_head.places = Silent(3)
    assert [generate(model)[1], generate(model)[1]] == [1, 1]


def test_steps_of_several_sizes_remember_little() -> None:
    """Rows that are filled up are other views in each step; what is kept of them is bounded."""
    with load(build("llama")) as engine:
        for length in (2, 30, 30, 30):
            engine.generate(prompts((3, 4, 5)), max_new_tokens=length)
        native = engine._bound.attention.native
        assert len(native._attend.__self__._laid) <= 2 * 3


def test_hooks_are_in_no_graph_on_disk(folder: Path) -> None:
    model = build("llama").__class__(build("llama").config).double()
    model.lm_head.register_forward_hook(lambda module, args, output: -output)
    generate(model)
    assert not folder.exists() or not list(folder.iterdir())


def test_auto_takes_it_for_a_model_that_was_warmed(folder: Path) -> None:
    for _ in range(2):
        with load("demo") as engine:  # its graphs are kept, and nobody asked for it
            engine.generate("Once", max_new_tokens=3)
            chosen = engine.plan
        assert jackfield.plan("demo")["compiler"].registered.name == "none"
    chosen["compiler"].registered.backend.warmed(chosen.requirements)
    assert jackfield.plan("demo")["compiler"].registered.name == "native"
    assert jackfield.plan("demo", compile="none")["compiler"].registered.name == "none"
    for other in ({"dtype": "bfloat16"}, {"deterministic": True}):
        assert jackfield.plan("demo", **other)["compiler"].registered.name == "none"
    beside = jackfield.plan("demo", kernels="cpu-rms-norm")  # which is no part of such a step
    assert beside["compiler"].registered.name == "none"
    folder.chmod(0o777)
    assert jackfield.plan("demo")["compiler"].registered.name == "native"  # of our own file
    (marked,) = folder.glob("*.warm")
    marked.write_bytes(b"")
    assert jackfield.plan("demo")["compiler"].registered.name == "none"


@pytest.mark.long
def test_warm_makes_a_graph_of_every_size(folder: Path, cli: Cli) -> None:
    assert cli("warm", "--rows", "3", "--json").json["rows"] == [1, 2, 4]
    kept = {file.stem.rpartition("-")[2] for file in folder.glob("*.json")}
    assert kept == {"1x1", "1x2", "1x4"}
    for compiler in ("none", "inductor?backend=eager"):
        done = cli("warm", "--rows", "1", "--compile", compiler)
        assert done.code == 2
        assert "keeps nothing on disk before a step comes; name 'native'" in done.err


@pytest.mark.parametrize("compiler", ["inductor?backend=eager", "none"])
def test_what_auto_does_not_take_is_not_warmed(compiler: str) -> None:
    with load("demo", "paged", compiler) as engine, pytest.raises(PlanError, match="warm 'native'"):
        engine.plan["compiler"].registered.backend.warmed(engine.plan.requirements)


FLAGS = {
    "AVX2": ["-march=haswell"],
    "plain C++": ["-march=x86-64"],
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.one_in(2)
def test_other_processors(flags: list[str], tmp_path: Path, forks: Forks) -> None:
    """The same sources without AVX-512, and without any of it: all operators, once more."""
    file = Path(__file__).with_name("test_native_operators.py")
    script = (
        "import sys; sys.path += sys.argv[2:]\n"
        "from jackfield_plugins.native import compiling\n"
        "from sanitizing import trapping\n"
        f"compiling.FLAGS = trapping('-O1', *{flags})\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-W', 'ignore', sys.argv[1]]))\n"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = forks.python("-c", script, file, file.parents[1] / "conformance", env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:3000]


def test_a_second_process_traces_nothing(tmp_path: Path, forks: Forks) -> None:
    """Whatever it says of what it does: the command line is quieter than Python is."""
    script = (
        "import sys, pathlib, logging, jackfield, transformers\n"
        "transformers.logging.set_verbosity(int(sys.argv[2]))\n"
        "logging.getLogger().setLevel(int(sys.argv[2]))\n"
        "from jackfield_plugins.compiler.native import compilation, kept\n"
        "kept.cache_root = lambda: pathlib.Path(sys.argv[1])\n"  # kernels are where they were
        "whole, traced = compilation.trace, []\n"
        "compilation.trace = lambda *a: traced.append(a) or whole(*a)\n"
        "with jackfield.load('demo', compile='native') as engine:\n"
        "    print(engine.generate('Once', max_new_tokens=6)[0].text, len(traced))\n"
    )
    said = [
        forks.python("-c", script, tmp_path, level).stdout.rsplit(" ", 1) for level in ("40", "10")
    ]
    assert said[0][0] == said[1][0]
    assert [one[1].strip() for one in said] == ["1", "0"]


@pytest.mark.long
def test_its_checks_pass() -> None:
    """`jackfield check`, whose calls are no engine's: columns, shapes, what it leaves behind."""
    done = subprocess.run(
        [sys.executable, "-m", "jackfield", "check", "plugin:native", "--limit", "4"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
