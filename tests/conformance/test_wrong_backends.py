"""A table of wrong backends: each one is named, with its distribution and version, in one line.

What no cheap check can see, such as numbers that are wrong, is not here: see docs/hardening.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from families import build, prompts
from wrong_attentions import ATTENTIONS, COMPILERS, PACKED, PADDED
from wrong_caches import BOTH, FORKS, TRANSFORMERS, packed, padded
from wrong_caches import PACKED as PAGES
from wrong_choices import SCHEDULERS, SEARCHES, STRATEGIES, scheduler, search, strategy

import jackfield
from jackfield.contracts import Backend
from jackfield.errors import ExecutionError, JackfieldError

PROMPTS = prompts((5, 3))
Plugs = Callable[[Backend], str]


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
@pytest.mark.one_in(4)
def test_a_wrong_compiler_is_named(plug: Plugs, name: str) -> None:
    blamed(
        "compiler",
        build("llama"),
        compile=plug(COMPILERS[name]()),
        attn_implementation="sdpa",
        cache_implementation="paged",
    )


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("layout", [padded, packed])
def test_a_wrong_cache_is_named(plug: Plugs, name: str, layout: Any) -> None:
    blamed("cache", build("llama"), cache_implementation=plug(layout(**BOTH[name])))


@pytest.mark.parametrize("name", PAGES)
def test_a_wrong_cache_of_pages_is_named(plug: Plugs, name: str) -> None:
    blamed("cache", build("llama"), cache_implementation=plug(packed(**PAGES[name])))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_wrong_cache_of_transformers_is_named(plug: Plugs, name: str) -> None:
    blamed("cache", build("llama"), cache_implementation=plug(TRANSFORMERS[name]()))


@pytest.mark.parametrize("name", FORKS)
@pytest.mark.parametrize("layout", [padded, packed])
def test_a_cache_that_copies_wrongly_is_named(plug: Plugs, name: str, layout: Any) -> None:
    cache = plug(layout(**FORKS[name]))
    blamed("cache", build("llama"), cache_implementation=cache, decoding="beam")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_wrong_scheduler_is_named(plug: Plugs, name: str) -> None:
    blamed("scheduler", build("llama"), scheduler=plug(scheduler(**SCHEDULERS[name])))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_wrong_strategy_is_named(plug: Plugs, name: str) -> None:
    blamed("decoding", build("llama"), decoding=plug(strategy(**STRATEGIES[name])))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_wrong_search_is_named(plug: Plugs, name: str) -> None:
    settings = {"suppress_tokens": [7], "num_beams": 3, "num_return_sequences": 2}
    blamed("decoding", build("llama"), decoding=plug(SEARCHES[name]()), settings=settings)


def test_what_is_not_wrong_runs(plug: Plugs) -> None:
    """The fakes themselves, with nothing changed, are right."""
    model = build("llama")
    expected = run(model, {}, {})
    for arguments in (
        {"cache_implementation": plug(padded())},
        {"cache_implementation": plug(packed())},
        {"scheduler": plug(scheduler())},
        {"decoding": plug(strategy())},
    ):
        assert run(model, dict(arguments), {}) == expected
    assert run(model, {"decoding": plug(search())}, {"num_beams": 3}) == run(
        model, {"decoding": "beam"}, {"num_beams": 3}
    )
