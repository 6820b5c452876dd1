"""A table of wrong backends: each one is named, with its distribution and version, in one line.

What no cheap check can see, such as numbers that are wrong, is not here: see docs/hardening.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from families import build, prompts
from wrong_attentions import ATTENTIONS, COMPILERS, PACKED, PADDED

import jackfield
from jackfield.choosing.discovery import registry
from jackfield.choosing.registry import Registered
from jackfield.contracts import Backend
from jackfield.errors import ExecutionError, JackfieldError

PROMPTS = prompts((5, 3))
Plugs = Callable[[Backend], str]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Plugs:
    def offered(backend: Backend) -> str:
        mine = Registered(backend, "stranger", "1.2", "ep")
        known = registry().backends[backend.kind]
        monkeypatch.setitem(registry().backends, backend.kind, [*known, mine])
        return f"plugin:stranger/{backend.name}"

    return offered


def run(model: Any, arguments: dict[str, Any], settings: dict[str, Any]) -> list[list[int]]:
    """One plain run."""
    with jackfield.load(model, **arguments) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=6, **settings)
    for completion in found:
        if completion.error is not None:
            raise ExecutionError(completion.error)
    return [completion.token_ids for completion in found]


def blamed(kind: str, model: Any, **arguments: Any) -> str:
    """The error of a plain run with a wrong backend, which names it and leaves the model alone."""
    before = model.config._attn_implementation
    settings = arguments.pop("settings", {})
    with pytest.raises(JackfieldError) as caught:
        run(model, arguments, settings)
    said = str(caught.value)
    assert f"{kind} 'wrong' of stranger 1.2: " in said, said
    assert len(said.splitlines()) == 1
    assert model.config._attn_implementation == before
    jackfield.load(model).close()  # is nobody's any more
    return said


@pytest.mark.parametrize("cache", ["dynamic", "paged"])
@pytest.mark.parametrize("name", [*ATTENTIONS, *PADDED, *PACKED])
def test_a_wrong_attention_is_named(plug: Plugs, name: str, cache: str) -> None:
    elsewhere = PACKED if cache == "dynamic" else PADDED
    if name in elsewhere:
        pytest.skip("of the other layout")
    made = {**ATTENTIONS, **PADDED, **PACKED}[name]()
    blamed(
        "attention",
        build("llama"),
        attn_implementation=plug(made),
        cache_implementation=cache,
    )


@pytest.mark.parametrize("name", COMPILERS)
def test_a_wrong_compiler_is_named(plug: Plugs, name: str) -> None:
    blamed(
        "compiler",
        build("llama"),
        compile=plug(COMPILERS[name]()),
        attn_implementation="sdpa",
        cache_implementation="paged",
    )
