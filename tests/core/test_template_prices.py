"""No call that a chat template can make gives more than its meter has left."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from jinja2.sandbox import modifies_known_mutable
from transformers.utils import chat_template_utils

from jackfield.bridge.template_sandbox import Environment, Exceeded, size_of

LEFT = 10_000
#: Each far below what is left, and any two multiplied far above it.
VALUES: list[Any] = ["x", "x" * 400, " x" * 200, 400, ["x" * 20] * 20, {"x": "x" * 400}, True]
FORMS = ["%s" * 200, "%400d" * 60, "{0:>400}" * 60, "{0}" * 200, "%(x)s" * 100, "{x}" * 100]
OWNERS: list[Any] = [*VALUES[1:-1], b"x" * 400, ("x" * 20,) * 20]


class Recorded:
    """An environment, and what its filters made, before anybody charged for it."""

    def __init__(self) -> None:
        own = copy.copy(chat_template_utils._compile_jinja_template("").environment)
        own.filters = {name: self._recording(act) for name, act in own.filters.items()}
        self.most = 0
        self.environment = Environment(own)
        self.context = self.environment.from_string("").new_context({})

    def _recording(self, act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def recording(*args: Any, **kwargs: Any) -> Any:
            found = act(*args, **kwargs)
            if hasattr(found, "__next__"):
                found = list(itertools.islice(found, 10 * LEFT))
            self.most = max(self.most, size_of(distinct(found, set()), 100 * LEFT))
            return found

        return recording

    def made(self, act: Callable[[], Any]) -> int:
        """How much a call makes, also where the meter stops it when it is done."""
        self.environment.meter.left, self.most = LEFT, 0
        with contextlib.suppress(Exception, Exceeded):  # no call that Python has, or stopped
            self.most = max(size_of(distinct(act(), set()), 100 * LEFT), self.most)
        return self.most


def distinct(value: Any, seen: set[int]) -> list[Any]:
    """What a value is made of in memory: what stands in it many times is there once."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, str | bytes):
        return [value]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return [None, *(one for part in value for one in distinct(part, seen))]
    return [str(value)]


def calls(most: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for count in range(most + 1):
        found += [(args, {}) for args in itertools.product(VALUES, repeat=count)]
    found += [((), {"old": "x", "new": "x" * 400}), ((), {"new": "x" * 400, "old": "x"})]
    return found


RECORDED = Recorded()
OF_TYPES = {
    kind: [name for name in dir(kind) if not name.startswith("_")]
    for kind in (str, bytes, list, tuple, dict, int)
}


@pytest.mark.parametrize("name", sorted(RECORDED.environment.filters))
def test_no_filter_makes_more_than_is_left(name: str) -> None:
    call = functools.partial(RECORDED.environment.call_filter, context=RECORDED.context)
    for owner, (args, kwargs) in itertools.product([*OWNERS, *FORMS], calls(2)):
        size = RECORDED.made(functools.partial(call, name, owner, args, kwargs))
        assert size <= LEFT + 1, (owner, args, kwargs)


@pytest.mark.parametrize("kind", OF_TYPES)
def test_no_method_makes_more_than_is_left(kind: type) -> None:
    call = functools.partial(RECORDED.environment.call, RECORDED.context)
    owners = [owner for owner in [*OWNERS, *FORMS] if type(owner) is kind]
    for name, owner, (args, kwargs) in itertools.product(OF_TYPES[kind], owners, calls(2)):
        method = getattr(owner, name)
        if callable(method) and not modifies_known_mutable(owner, name):
            size = RECORDED.made(functools.partial(call, method, *args, **kwargs))
            assert size <= LEFT + 1, (name, owner, args, kwargs)


@pytest.mark.parametrize("operator", sorted(Environment.intercepted_binops))
def test_no_operator_makes_more_than_is_left(operator: str) -> None:
    call = functools.partial(RECORDED.environment.call_binop, RECORDED.context, operator)
    for left, right in itertools.product([*OWNERS, *FORMS], [*VALUES, *OWNERS]):
        assert RECORDED.made(functools.partial(call, left, right)) <= LEFT + 1, (left, right)
