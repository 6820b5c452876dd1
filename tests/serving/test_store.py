"""What is stored is bounded, in count and in bytes, for each owner alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.serving.errors import ApiError
from jackfield.serving.schema.common import as_json
from jackfield.serving.store import Store, Stored


def stored(name: str, size: int = 1, items: tuple[Any, ...] = (), before: int = 0) -> Stored:
    output = [{"id": f"msg_{name}", "text": "x" * size}]
    return Stored({"id": name, "output": output}, items, before)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 300))))
def test_the_bounds_hold_for_each_owner(acts: list[tuple[str, int, int]]) -> None:
    store, kept = Store(3, 500), {"a": {}, "b": {}}  # type: ignore[var-annotated]
    for n, (owner, which, size) in enumerate(acts):
        mine = kept[owner]
        if which < 3 and mine:  # use one
            name = list(mine)[which % len(mine)]
            assert store.get(owner, name) is mine[name]
            mine[name] = mine.pop(name)
        elif which == 3 and mine:
            store.delete(owner, name := next(iter(mine)))
            del mine[name]
        else:
            one = mine[f"r{n}"] = stored(f"r{n}", size)
            store.put(owner, one)
            while len(mine) > 3 or sum(map(bytes_of, mine.values())) > 500:
                del mine[next(iter(mine))]
        for name, others in (("a", "b"), ("b", "a")):
            for known in kept[name]:
                assert store.item(name, f"msg_{known}") is not None
                assert store.item(others, f"msg_{known}") is None
    assert len(store) == sum(map(len, kept.values()))
    for owner, mine in kept.items():
        assert store._owners[owner]._size == sum(map(bytes_of, mine.values())) if mine else True
        assert len(store._owners[owner]._of_item) == len(mine) if mine else True


def bytes_of(one: Stored) -> int:
    return len(as_json([one.response, one.items]).encode())


def test_another_is_told_nothing() -> None:
    store = Store(3, 500)
    store.put("a", stored("one"))
    with pytest.raises(ApiError) as theirs:
        store.get("b", "one")
    with pytest.raises(ApiError) as none:
        store.get("b", "two")
    assert theirs.value.status == none.value.status == 404
    assert theirs.value.message.replace("one", "two") == none.value.message
    with pytest.raises(ApiError):
        store.delete("b", "one")
    assert store.get("a", "one").response["id"] == "one"


def test_a_conversation_is_whole_without_the_responses_before() -> None:
    store = Store(1, 10_000)
    first = stored("one", items=({"id": "msg_ask"},))
    store.put("", first)
    second = stored("two", items=(*first.conversation, {"id": "msg_more"}), before=2)
    store.put("", second)
    names = [item["id"] for item in store.get("", "two").conversation]
    assert names == ["msg_ask", "msg_one", "msg_more", "msg_two"]
    assert store.item("", "msg_one") is None  # gone with its response
    assert store.item("", "msg_more") == {"id": "msg_more"}


def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    store = Store(3, 100)
    store.put("", stored("large", 1000))
    assert len(store) == 0
    with pytest.raises(ApiError):
        store.get("", "large")
