"""Every message is one clean line, whatever is quoted in it."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield import errors
from jackfield.errors import JackfieldError, shown

KINDS = [
    kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, JackfieldError)
]
TEXTS = st.text(st.characters(exclude_categories=()), max_size=400)


@given(TEXTS, st.integers(1, 300))
def test_what_is_quoted_is_one_printable_line(text: str, most: int) -> None:
    seen = shown(text, most)
    assert seen.isprintable()
    seen.encode()
    assert len(seen) <= 10 * most + 1  # an escape takes ten characters at most
    if text.isprintable() and len(text) <= most:
        assert seen == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_every_error_is_one_printable_line(kind: type[JackfieldError], text: str) -> None:
    assert str(kind(text)).isprintable()
    assert len(str(kind(text * 1000))) < 110_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_says_the_same(kind: type[JackfieldError]) -> None:
    there = copy.deepcopy(kind("a\nb"))
    assert (type(there), str(there)) == (kind, r"a\nb")
