"""The grammar of selections, and options made from texts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.errors import OptionError, PluginError, SelectionError
from jackfield.registry.backends import Registry
from jackfield.spelling import AUTO, Selection, make_options, nearest, parse, parse_all

NAMES = st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True)
TEXTS = st.text()


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("sdpa", Selection("sdpa")),
        ("plugin:sdpa", Selection("sdpa")),
        ("plugin:My-Dist/sdpa", Selection("sdpa", "My-Dist")),
        ("jackfield/sdpa", Selection("sdpa", "jackfield")),
        ("static?length=5", Selection("static", None, {"length": "5"})),
        ("plugin:d/x?a=1&b=", Selection("x", "d", {"a": "1", "b": ""})),
        ("hub?repo=org/flash-attn&revision=v1", Selection("hub", None,
         {"repo": "org/flash-attn", "revision": "v1"})),
        ("x?scale=1e+5", Selection("x", None, {"scale": "1e+5"})),
        ("x?a=b=c", Selection("x", None, {"a": "b=c"})),
        ("x?a=b%26c%3D?&d=%20", Selection("x", None, {"a": "b&c=?", "d": " "})),
    ],
)  # fmt: skip
def test_what_can_be_read(text: str, selection: Selection) -> None:
    assert parse(text) == selection


@pytest.mark.parametrize(
    "text",
    ["", "plugin:", " sdpa", "sdpa ", "a b", "a/b/c", "/x", "x/", "plugin:plugin:x", "flash|paged",
     "?a=1", "päd", "x\n"],
)  # fmt: skip
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(SelectionError, match="write 'plugin:name'") as caught:
        parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("query", ["", "a", "a&b=1", "=1", "&", "a=1&", "a=1&&b=2"])
def test_options_that_cannot_be_read(query: str) -> None:
    with pytest.raises(OptionError, match=r"write '\?option=value&other=value'"):
        parse(f"x?{query}")


@pytest.mark.parametrize("query", ["a=1&a=2", "a=1&a=1", "a=1&%61=2"])
def test_an_option_given_twice(query: str) -> None:
    with pytest.raises(OptionError, match="option 'a' is given twice"):
        parse(f"x?{query}")


@given(
    NAMES,
    st.none() | NAMES,
    st.dictionaries(st.text(min_size=1), TEXTS, max_size=3),
)
def test_a_selection_is_what_it_says(
    name: str, distribution: str | None, arguments: dict[str, str]
) -> None:
    selection = Selection(name, distribution, arguments)
    assert parse(str(selection)) == selection


@given(TEXTS)
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing but our own errors, whatever the text."""
    with contextlib.suppress(SelectionError, OptionError):
        selection = parse(text)
        assert parse(str(selection)) == selection


@pytest.mark.parametrize(
    "value", [None, 5, b"sdpa", {"sdpa"}, {"sdpa": 1}, sorted, [None], [["x"]]]
)
def test_a_value_that_selects_nothing(value: Any) -> None:
    with pytest.raises(SelectionError, match="selected by"):
        parse_all(value)


@pytest.mark.parametrize("value", [[], ()])
def test_an_empty_list(value: Any) -> None:
    with pytest.raises(SelectionError, match="empty list"):
        parse_all(value)


def test_several() -> None:
    assert parse_all("auto") == [AUTO]
    assert parse_all(["a", "plugin:b", "auto"]) == [Selection("a"), Selection("b"), AUTO]
    assert parse_all(("a",)) == [Selection("a")]


@dataclass(frozen=True)
class Options:
    size: int = 16
    ratio: float = 0.5
    fast: bool = False
    label: str = ""
    mode: Literal["nf4", "fp4", 8] = "nf4"
    limit: int | None = None
    old: Optional[float] = None  # noqa: UP045 - what older code writes
    choice: Literal["a", "b"] | None = None
    flag: bool | None = None
    made: int = field(default=1, init=False)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("size", "5", 5), ("size", "-5", -5),
        ("ratio", "1e-3", 0.001), ("ratio", "2", 2.0),
        ("fast", "true", True), ("fast", "True", True), ("fast", "1", True), ("fast", "yes", True),
        ("fast", "false", False), ("fast", "0", False), ("fast", "No", False),
        ("label", "", ""), ("label", "none", "none"), ("label", "5", "5"),
        ("mode", "fp4", "fp4"), ("mode", "8", 8),
        ("limit", "none", None), ("limit", "None", None), ("limit", "7", 7),
        ("old", "none", None), ("old", "1", 1.0),
        ("choice", "a", "a"), ("choice", "none", None),
        ("flag", "no", False), ("flag", "none", None),
    ],
)  # fmt: skip
def test_an_option_gets_its_type(key: str, text: str, value: Any) -> None:
    made = getattr(make_options(Options, {key: text}, "cache 'x'"), key)
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("size", "big", "must be of type int, not 'big'"),
        ("size", "5.0", "must be of type int"),
        ("size", "none", "must be of type int"),
        ("size", "", "must be of type int, not ''"),
        *[("size", odd, "must be of type int") for odd in ("1_0", "٢", " 1", "1\n", "²")],
        ("ratio", "half", "must be of type float"),
        ("fast", "maybe", "must be of type bool"),
        ("fast", "", "must be of type bool"),
        ("mode", "int4", "must be one of nf4, fp4, 8, not 'int4'"),
        ("limit", "x", "must be of type int"),
        ("choice", "c", "must be one of a, b"),
    ],
)  # fmt: skip
def test_an_option_of_the_wrong_type(key: str, text: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_options(Options, {key: text}, "cache 'x'")
    assert f"option {key!r} of cache 'x' {says}" in str(caught.value)


def test_an_unknown_option() -> None:
    with pytest.raises(OptionError) as caught:
        make_options(Options, {"Sise": "5"}, "cache 'x'")
    assert str(caught.value) == (
        "cache 'x' has no option 'Sise' (options: choice, fast, flag, label, limit, mode, old, "
        "ratio, size); did you mean 'size'?"
    )
    with pytest.raises(OptionError, match="has no option 'made'"):
        make_options(Options, {"made": "5"}, "cache 'x'")


def test_a_backend_without_options() -> None:
    @dataclass(frozen=True)
    class Nothing: ...

    assert make_options(Nothing, {}, "cache 'x'") == Nothing()
    with pytest.raises(OptionError, match=r"has no option 'a' \(options: none\)$"):
        make_options(Nothing, {"a": "1"}, "cache 'x'")


def test_a_required_option() -> None:
    @dataclass(frozen=True)
    class Hub:
        repo: str
        revision: str

    with pytest.raises(OptionError, match=r"attention 'hub' needs the option 'revision': write"):
        make_options(Hub, {"repo": "a/b"}, "attention 'hub'")
    assert make_options(Hub, {"repo": "a/b", "revision": "1"}, "") == Hub("a/b", "1")


def test_the_class_may_refuse_values() -> None:
    @dataclass(frozen=True)
    class Paged:
        page_size: int = 16

        def __post_init__(self) -> None:
            if self.page_size == 7:
                raise KeyError("seven")
            if self.page_size % 16:
                raise ValueError("page_size must be a multiple of 16")

    with pytest.raises(OptionError, match=r"^cache 'paged': page_size must be a multiple of 16$"):
        make_options(Paged, {"page_size": "5"}, "cache 'paged'")
    with pytest.raises(PluginError, match=r"^cache 'paged': options raised KeyError: 'seven'"):
        make_options(Paged, {"page_size": "7"}, "cache 'paged'")


def test_nearest() -> None:
    assert nearest("spda", ["eager", "sdpa"]) == "; did you mean 'sdpa'?"
    assert nearest("SDPA", ["eager", "sdpa"]) == "; did you mean 'sdpa'?"
    assert nearest("quantum", ["eager", "sdpa"]) == ""
    hooks = ["jackfield_attention", "jackfield_cache", "jackfield_decoding"]
    assert nearest("jackfield_cashe", hooks) == "; did you mean 'jackfield_cache'?"
    assert (
        nearest("flex_attn", ["flex_att", "flex_at"]) == "; did you mean 'flex_att' or 'flex_at'?"
    )
    assert nearest("x", []) == ""


def test_no_backends_at_all() -> None:
    with pytest.raises(SelectionError) as caught:
        Registry().find("cache", parse("static?length=5"))
    assert str(caught.value) == (
        "no plugin offers any cache backend, so 'plugin:static?length=5' cannot be had; the "
        "built-in ones come with `pip install jackfield` (see `jackfield doctor`)"
    )
