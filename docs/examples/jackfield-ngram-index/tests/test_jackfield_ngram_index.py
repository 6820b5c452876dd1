"""What jackfield checks of a decoding, one test each, and what is only known here."""

from __future__ import annotations

from collections.abc import Callable

import jackfield
import pytest

PROMPTS = ["Once upon a time", "Sort these numbers: 41 7 88 23. Sort these numbers: 41 7"]


def test_the_text_is_the_same_without_it() -> None:
    with (
        jackfield.load("demo", decoding="plugin:ngram-index") as own,
        jackfield.load("demo") as other,
    ):
        found, right = (
            [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=24)]
            for engine in (own, other)
        )
    assert found == right


@pytest.mark.jackfield_backend("plugin:ngram-index", kind="decoding")
def test_declared(jackfield_check: Callable[[], None]) -> None:
    jackfield_check()
