"""Whatever a plugin's code raises is reported as that plugin's, in one wording, on one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.errors import (
    CacheFullError,
    JackfieldError,
    PluginError,
    SettingsError,
    error_text,
    quoted,
)
from jackfield.guarded import fault, guarded

WHO = "attention 'x' of dist 1.2"


class UntoldError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text either")

    __repr__ = __str__


def raised(error: BaseException) -> JackfieldError:
    with pytest.raises(JackfieldError) as caught, guarded(WHO, "forward"):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (ValueError("two\nlines"), "ValueError: two"),
        (RuntimeError("the cause is:\n  a driver"), "RuntimeError: the cause is: a driver"),
        (KeyError("seven"), "KeyError: 'seven'"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (UntoldError(), "UntoldError: (its text cannot be made)"),
    ],
)
def test_what_a_plugin_raises_is_told_as_its_own(error: BaseException, says: str) -> None:
    caught = raised(error)
    assert isinstance(caught, PluginError)
    assert str(caught) == f"{WHO}: forward raised {says}"
    assert caught.plugin == WHO
    assert caught.__cause__ is error


def test_errors_of_our_tree_keep_their_type_and_are_told_once() -> None:
    with pytest.raises(CacheFullError) as caught, guarded("compiler 'c' of far 2", "step"):
        raise raised(CacheFullError("no room"))
    assert str(caught.value) == f"{WHO}: no room"
    assert caught.value.plugin == WHO
    assert str(raised(fault("cache 'y' of other 1", "commit lost tokens"))) == (
        "cache 'y' of other 1: commit lost tokens"
    )
    assert isinstance(raised(SettingsError("not so")), SettingsError)


def test_who_interrupts_is_not_the_plugin() -> None:
    with pytest.raises(KeyboardInterrupt), guarded(WHO, "forward"):
        raise KeyboardInterrupt


@given(st.text())
def test_an_error_is_told_on_one_line(said: str) -> None:
    assert len(str(raised(ValueError(said))).splitlines()) == 1
    assert len(error_text(ValueError(said * 1000))) < 500


@pytest.mark.parametrize(
    "value", [UntoldError(), [UntoldError()], {"a": "b" * 10**6}, list(range(10**5))]
)
def test_what_a_plugin_returned_is_shown_in_few_words(value: Any) -> None:
    assert len(quoted(value)) < 400


def test_a_guard_needs_no_torch() -> None:
    code = "import jackfield.guarded, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_guard_can_be_used_again() -> None:
    guard = guarded(WHO, "write")
    calls: list[Callable[[], object]] = [lambda: 1, lambda: 1 / 0, lambda: 1]
    told_of = 0
    for call in calls:
        try:
            with guard:
                call()
        except PluginError:
            told_of += 1
    assert told_of == 1
