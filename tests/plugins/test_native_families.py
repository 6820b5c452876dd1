"""Native steps say what uncompiled ones say, in all families and all that changes a step's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driven import arrivals, compiled, drive, tokens
from families import FAMILIES, MORE_FAMILIES, build, character_tokenizer, prompts

import jackfield
from jackfield.errors import CheckpointError, PlanError
from jackfield_plugins.compiler.native.compilation import NativeCompilation

Said = list[Any]


def load(model: Any, compiler: str, cache: str = "paged", **more: Any) -> jackfield.Engine:
    return jackfield.load(model, compile=compiler, cache_implementation=cache, **more)


def joins(model: Any, compiler: str) -> Said:
    with load(model, compiler, max_batch_size=5, prefill_chunk_size=12) as engine:
        return tokens(drive(engine, arrivals(9)))


def evictions(model: Any, compiler: str) -> Said:
    cache = "paged?page_size=4&num_tokens=96&prefix_sharing=false"
    with load(model, compiler, cache, max_batch_size=5) as engine:
        return tokens(drive(engine, arrivals(9, seed=2)))


def drafts(model: Any, compiler: str) -> Said:
    texts = [[7, 8, 9, 10] * 5, [3, 4, 5] * 7, *prompts((17,))]
    with load(model, compiler, decoding="prompt_lookup") as engine:
        return [one.token_ids for one in engine.generate(texts, max_new_tokens=12)]


def beams(model: Any, compiler: str) -> Said:
    with load(model, compiler, decoding="beam") as engine:
        done = engine.generate(prompts((6, 11)), num_beams=3, max_new_tokens=6)
        return [one.token_ids for one in done]


def structures(model: Any, compiler: str) -> Said:
    with load(model, compiler, tokenizer=character_tokenizer()) as engine:
        done = engine.generate(prompts((6, 11)), regex="[ -k]{4,9}", max_new_tokens=10)
        return [one.token_ids for one in done]


def adapters(model: Any, compiler: str) -> Said:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model.add_adapter(peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    with load(model, compiler) as engine:
        found = []
        for switch in (engine.enable_adapter, engine.disable_adapter):
            switch()
            found += [one.token_ids for one in engine.generate(prompts((6, 11)), max_new_tokens=6)]
        return found


#: By `native`, or by the cache `paged`.
REFUSED = {
    "falcon-alibi", "llama4", "lfm2", "qwen3-next", "diffllama", "hrm-text", "bloom",
}  # fmt: skip
WAYS: tuple[Callable[..., Said], ...] = (joins, evictions, drafts, beams, structures, adapters)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # what PEFT does about Conv1D
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # and experts
@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_tokens_are_those_of_uncompiled_steps(family: str) -> None:
    """In float32, which experts need; windows and softcaps are the families' own."""
    offered = 0
    for way in WAYS:
        said = []
        for compiler in ("none", "native"):
            model = build(family, torch.float32)
            if model._can_set_experts_implementation():
                model.set_experts_implementation("grouped_mm")
            try:
                said.append(way(model, compiler))
            except (PlanError, CheckpointError):
                break  # refused in the plan, with either
        if len(said) == 2:
            assert said[0] == said[1], way.__name__
            offered += 1
    assert bool(offered) == (family not in REFUSED)


def test_native_steps_are_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep above would pass without them."""
    # Else the prompt is a native step, too, where another test has traced steps of as many rows.
    monkeypatch.setattr(NativeCompilation, "reads", lambda *_: False)
    with load(build("llama", torch.float32), "native") as engine:
        engine.generate([5, 6, 7], max_new_tokens=4)
        assert compiled(engine).calls == 3
