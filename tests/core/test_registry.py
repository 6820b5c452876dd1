"""Looking backends up, and binding them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.contracts import Attention, BoundAttention, ModelAttention
from jackfield.errors import PlanError, PluginError, SelectionError
from jackfield.registry.backends import PluginRecord, Registered, Registry
from jackfield.spelling import parse


def registry_of(*entries: tuple[str, str, str]) -> Registry:
    made = Registry()
    for kind, distribution, name in entries:
        backend: Any = SimpleNamespace(kind=kind, name=name)
        made.backends[kind].append(Registered(backend, distribution, "1.0", name))
    return made


FOUND = registry_of(
    ("attention", "jackfield", "eager"),
    ("attention", "jackfield", "sdpa"),
    ("attention", "outside", "eager"),
    ("cache", "jackfield", "dynamic"),
)


ATTENTIONS = "(known: eager, sdpa)"
MESSAGES = {
    ("attention", "spda"): f"there is no attention 'spda' {ATTENTIONS}; did you mean 'sdpa'?",
    ("attention", "SDPA"): f"there is no attention 'SDPA' {ATTENTIONS}; did you mean 'sdpa'?",
    ("attention", "dynamic"): (
        f"there is no attention 'dynamic' {ATTENTIONS}; 'dynamic' is of kind cache"
    ),
    ("cache", "sdpa"): "there is no cache 'sdpa' (known: dynamic); 'sdpa' is of kind attention",
    ("attention", "outside/sdpa"): (
        "there is no attention 'sdpa' in distribution 'outside' (known: eager)"
    ),
    ("attention", "outsied/eager"): (
        "no distribution 'outsied' offers any attention (those that do: jackfield, outside); "
        "did you mean 'outside'?"
    ),
    ("cache", "outside/eager"): (
        "no distribution 'outside' offers any cache (those that do: jackfield)"
    ),
    ("attention", "eager"): (
        "attention 'eager' is offered by jackfield 1.0 and outside 1.0; say which: "
        "'plugin:jackfield/eager' or 'plugin:outside/eager'"
    ),
    ("decoding", "sample?x=1"): (
        "no plugin offers any decoding backend, so 'plugin:sample?x=1' cannot be had; the "
        "built-in ones come with `pip install jackfield` (see `jackfield doctor`)"
    ),
}


@pytest.mark.parametrize(("kind", "selection"), MESSAGES)
def test_names_that_mean_nothing_or_two_things(kind: str, selection: str) -> None:
    with pytest.raises(SelectionError) as caught:
        FOUND.find(kind, parse(selection))
    assert str(caught.value) == MESSAGES[kind, selection]


@pytest.mark.parametrize("where", ["jackfield", "outside", "Outside"])
def test_a_distribution_in_front_decides(where: str) -> None:
    assert FOUND.find("attention", parse(f"{where}/eager")).distribution == where.lower()


def test_an_address_leads_back() -> None:
    for kind, several in FOUND.backends.items():
        for registered in several:
            assert FOUND.find(kind, parse(FOUND.address(registered))) is registered
    assert FOUND.address(FOUND.backends["attention"][1]) == "sdpa"


def test_an_unknown_name_points_at_plugins_that_failed() -> None:
    found = registry_of(("attention", "jackfield", "eager"))
    found.plugins.append(PluginRecord("ep", "mod", "dist", "1", "failed", cause="broken"))
    with pytest.raises(SelectionError, match=r"1 plugin\(s\) failed to load, see `jackfield plug"):
        found.find("attention", parse("kernel"))


def bound_by(bind: Any) -> Any:
    backend = type("Mine", (Attention,), {"name": "mine", "bind": lambda self, context: bind()})()
    context: Any = None
    return Registered(backend, "outside", "1.0", "ep").bind(context)


def raises(error: BaseException) -> Any:
    raise error


def test_what_bind_returns_is_passed_on() -> None:
    pair = BoundAttention(print, print)
    assert bound_by(lambda: pair) is pair
    assert bound_by(lambda: ModelAttention("eager")) == ModelAttention("eager")


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        (lambda: BoundAttention(print, None), "raised TypeError: an attention without a mask func"),
        (lambda: raises(OSError("no driver")), "raised OSError: no driver"),
        (lambda: None, "must return a BoundAttention or ModelAttention, got None"),
        (lambda: (print, print), "must return a BoundAttention or ModelAttention, got (<built-in"),
    ],
)
def test_a_bind_that_breaks_is_named(bind: Any, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        bound_by(bind)
    assert str(caught.value).startswith(f"attention 'mine' of outside 1.0: bind {message}")


def test_an_error_of_our_tree_stays_itself() -> None:
    with pytest.raises(PlanError, match="needs sm90"):
        bound_by(lambda: raises(PlanError("needs sm90")))


def test_a_size_that_cannot_be_told_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def weight_bytes(self: Any) -> int:
        raise ZeroDivisionError

    methods: dict[str, Any] = {"bind": weight_bytes, "weight_bytes": weight_bytes}
    backend = type("Mine", (Attention,), {"name": "sizeless", **methods})()
    registered = Registered(backend, "odd", "1.5", "odd-ep")
    assert [registered.size("weight_bytes") for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == (
        "attention 'sizeless' of odd 1.5: weight_bytes raised ZeroDivisionError: sizes are told "
        "without it"
    )
