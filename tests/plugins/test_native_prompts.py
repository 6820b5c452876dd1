"""Short prompts are read in native steps, where a graph of as many tokens is there already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driven import arrivals, compiled, drive, tokens
from families import FAMILIES, build, prompts

import jackfield
from jackfield.bridge.opaque import tracing
from jackfield_plugins.compiler.native import kept, warmed
from jackfield_plugins.compiler.native.compilation import NativeCompilation
from jackfield_plugins.compiler.native.linears import few
from jackfield_plugins.native import keeping


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kept, warmed):
        monkeypatch.setattr(module, "cache_root", lambda: keeping.own_folder(tmp_path / "cache"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that reads prompts, whether it was compiled."""
    answers: list[bool] = []
    own = NativeCompilation.reads

    def reads(self: NativeCompilation, rows: int, width: int) -> bool:
        answers.append(own(self, rows, width))
        return answers[-1]

    monkeypatch.setattr(NativeCompilation, "reads", reads)
    return answers


def load(model: Any, compiler: str = "native", **more: Any) -> jackfield.Engine:
    return jackfield.load(model, cache_implementation="paged", compile=compiler, **more)


def ahead(engine: jackfield.Engine, *sizes: int) -> None:
    """Have graphs of these sizes, and of no others: to trace one is most of what a test takes."""
    forward = engine._bound.compiled
    assert forward is not None
    with tracing():
        forward.compilation.ahead(forward._step, [(1, size) for size in sizes])


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"falcon-alibi"}))
@pytest.mark.one_in(8)
def test_logits_and_texts_are_those_of_steps_that_are_not_compiled(
    family: str, read: list[bool]
) -> None:
    """With heads of every kind: tied, with a bias, behind a softcap; several prompts in a step."""
    model, texts = build(family, torch.float32), prompts((5, 9, 3, 1))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    asked = {"max_new_tokens": 5, "output_logits": True}
    found: dict[str, list[Any]] = {}
    for compiler in ("none", "native"):
        with load(model, compiler) as engine:
            if compiler == "native":
                ahead(engine, 24)
            found[compiler] = engine.generate(texts, **asked)
    assert read == [True]
    for one, due in zip(found["native"], found["none"], strict=True):
        assert one.token_ids == due.token_ids
        ours, theirs = (torch.as_tensor(c.logits).double() for c in (one, due))
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "gemma3"])
def test_pieces_of_prompts_beside_rows_that_decode(family: str, read: list[bool]) -> None:
    model, coming = build(family), arrivals(20)
    limits = {"max_batch_size": 7, "prefill_chunk_size": 12}
    with load(model, "none", **limits) as engine:
        expected = tokens(drive(engine, coming))
    with load(model, **limits) as engine:
        ahead(engine, 16, 24)
        assert tokens(drive(engine, coming)) == expected
    assert read.count(True) > 5


def test_nobody_waits_for_a_trace_of_a_prompt(
    read: list[bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, most = build("llama", torch.float32), few(torch.float32)
    with load(model) as engine:
        engine.generate(prompts((20,)), max_new_tokens=3)
        assert read == [False]
        assert compiled(engine).compiled.graphs == 1
        ahead(engine, 2, most)
        graphs = compiled(engine).compiled.graphs
        engine.generate(prompts((20, most - 20)), max_new_tokens=3)
        engine.generate(prompts((most + 1,)), max_new_tokens=3)
        assert read == [False, True, False]
        assert compiled(engine).compiled.graphs == graphs
    with load(model) as engine:  # on disk by now
        engine.generate(prompts((most,)), max_new_tokens=3)
    assert read[-1]
    (file,) = (tmp_path / "cache").rglob(f"*1x{most}*")
    file.write_bytes(file.read_bytes()[:-1])
    with load(model) as engine:
        for _ in range(2):
            engine.generate(prompts((most,)), max_new_tokens=3)
        assert compiled(engine).compiled.graphs == 1
    assert read[-2:] == [False, False]
    assert caplog.text.count("is damaged, or was changed") == 1  # and said once


@pytest.mark.parametrize(
    ("decoding", "asked"),
    [
        ("beam", {"num_beams": 3}),
        ("prompt_lookup", {}),
        ("sample", {"logprobs": 2}),
        ("sample", {"num_return_sequences": 2, "seed": 5, "do_sample": True}),
    ],
    ids=["beams", "drafts", "logprobs", "samples"],
)
@pytest.mark.one_in(4)
def test_whatever_is_decoded_beside_prompts(
    decoding: str, asked: dict[str, Any], read: list[bool]
) -> None:
    model, texts = build("llama"), [[7, 8, 9, 10] * 3, prompts((6,))[0]]
    found = []
    for compiler in ("none", "native"):
        with load(model, compiler, decoding=decoding) as engine:
            if compiler == "native":
                ahead(engine, 24)
            made = engine.generate(texts, max_new_tokens=6, **asked)
            found.append([(c.token_ids, c.logprobs and len(c.logprobs)) for c in made])
    assert found[0] == found[1]
    assert read
    assert all(read)


def test_a_prompt_of_a_model_that_was_changed_waits_for_no_trace(read: list[bool]) -> None:
    model = build("llama", torch.float32)
    with load(model) as engine:
        ahead(engine, 24)
        engine.generate(prompts((20,)), max_new_tokens=2)
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.nn.Tanh()
        engine.generate(prompts((20,)), max_new_tokens=2)
    assert read == [True, False]
