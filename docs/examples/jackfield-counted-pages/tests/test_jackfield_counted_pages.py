"""What jackfield checks of a cache, one test each, and what is only known here."""

from __future__ import annotations

from collections.abc import Callable

import jackfield
import pytest

PROMPTS = ["Once upon a time", "Sort these numbers: 41 7 88 23. Sort these numbers: 41 7"]


def test_the_text_is_the_same_without_it() -> None:
    with (
        jackfield.load("demo", cache_implementation="plugin:counted-pages") as own,
        jackfield.load("demo") as other,
    ):
        found, right = (
            [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=24)]
            for engine in (own, other)
        )
    assert found == right


def test_pages_are_counted() -> None:
    with jackfield.load(
        "demo", cache_implementation="plugin:counted-pages?num_tokens=256"
    ) as engine:
        engine.generate(PROMPTS, max_new_tokens=8)
        usage = engine.statistics().cache
    assert usage is not None
    assert (usage.pages, usage.pages_used) == (16, 0)
    assert usage.prompt_tokens > 0


@pytest.mark.jackfield_backend("plugin:counted-pages", kind="cache")
def test_declared(jackfield_check: Callable[[], None]) -> None:
    jackfield_check()
