"""Decode steps are compiled before anybody waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from families import build, prompts

import jackfield
from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.native import kept
from jackfield_plugins.native import keeping

if TYPE_CHECKING:
    from command_line import Cli


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "cache_root", lambda: keeping.own_folder(tmp_path / "cache"))


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_no_step_is_compiled_later(cache: str) -> None:
    common = {"cache_implementation": cache, "max_batch_size": 3}
    with jackfield.load(build("llama"), compile="none", **common) as engine:
        expected = [one.token_ids for one in engine.generate(prompts((5, 9, 3)), max_new_tokens=5)]
        assert engine.compile_ahead() == []
    with jackfield.load(build("llama"), compile="native", **common) as engine:
        assert engine.compile_ahead() == [1, 2, 4]
        assert engine.report()["compiler"].compiled.graphs == 3
        found = engine.generate(prompts((5, 9, 3)), max_new_tokens=5)
        assert [one.token_ids for one in found] == expected
        engine.generate([5, 6, 7], max_new_tokens=3)
        assert engine.report()["compiler"].compiled.graphs == 3
        assert engine.compile_ahead() == []  # nothing is left to do


def test_a_model_that_cannot_be_traced_says_so_ahead() -> None:
    model = build("llama").__class__(build("llama").config).double()
    whole = model.model.norm.forward
    model.model.norm.forward = lambda states: whole(states) * states.sum().item()
    with (
        jackfield.load(model, compile="native", cache_implementation="paged") as engine,
        pytest.raises(ExecutionError, match="native cannot trace LlamaForCausalLM"),
    ):
        engine.compile_ahead()


def test_compilers_that_wait_for_a_step_compile_nothing_ahead() -> None:
    with jackfield.load(
        build("llama"), compile="inductor?backend=eager", cache_implementation="paged"
    ) as engine:
        assert engine.compile_ahead() == []


def test_warm_says_where_nothing_is_kept(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_key_of", lambda model: None)  # as of a model that has a hook
    done = cli("warm", "--rows", "1", "--json")
    assert done.code == 2
    assert "graphs of demo cannot be kept for other processes" in done.err
