"""Every message is one clean line, whatever is quoted in it."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield import errors
from jackfield.errors import JackfieldError, error_text, quoted, shown

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


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(), "ValueError"),
        (ValueError("no\nthanks"), "ValueError: no"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_an_error_is_told_with_its_type_once(error: Exception, text: str) -> None:
    assert error_text(error) == text


class Unspeakable:
    def __repr__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb\x1b\ud800", r"'a\nb\x1b\ud800'"),
        ("\\", r"'\\'"),
        ([1, "\t"], r"[1, '\t']"),
        (Unspeakable(), "a Unspeakable"),
    ],
)
def test_a_value_is_escaped_once(value: object, text: str) -> None:
    assert quoted(value) == text
