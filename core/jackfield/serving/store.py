"""Responses that may be asked for again: bounded, and each only by whose key it was made with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.errors import quoted
from jackfield.serving.errors import ApiError
from jackfield.serving.schema.common import as_json

Json = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A response, and the items that it answered; the first `before` are of earlier responses."""

    response: Json
    items: tuple[Json, ...]
    before: int

    @property
    def conversation(self) -> list[Json]:
        """All items up to now, its own included."""
        return [*self.items, *self.response["output"]]

    @property
    def own(self) -> Sequence[Json]:
        """The items that came with it, and those that it consists of."""
        return [*self.items[self.before :], *self.response["output"]]


class Store:
    """At most `count` responses and `num_bytes` of JSON for each owner; the one not used for the
    longest time goes first.

    A response keeps the whole conversation before it, so that one goes on when the earlier ones
    are gone; what several share counts for each.
    """

    def __init__(self, count: int, num_bytes: int) -> None:
        self._count, self._bytes = count, num_bytes
        self._owners: dict[str, _Shelf] = {}

    def put(self, owner: str, stored: Stored) -> None:
        if self._count:
            shelf = self._owners.setdefault(owner, _Shelf())
            shelf.put(stored)
            shelf.shrink(self._count, self._bytes)

    def get(self, owner: str, name: str) -> Stored:
        """Raises ApiError (404), also where it is another's."""
        shelf = self._owners.get(owner)
        if shelf is None or (stored := shelf.get(name)) is None:
            raise ApiError(
                404, f"there is no response {quoted(name)}", param="response_id", code="not_found"
            )
        return stored

    def delete(self, owner: str, name: str) -> None:
        """Raises ApiError (404)."""
        self.get(owner, name)
        self._owners[owner].drop(name)

    def item(self, owner: str, name: str) -> Json | None:
        """The item of this id; None: it is not here, or another's."""
        shelf = self._owners.get(owner)
        return None if shelf is None else shelf.item(name)

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))


class _Shelf:
    """What is stored of one owner."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self._of_item: dict[str, str] = {}  # the id of an item -> that of its response
        self._size = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: Stored) -> None:
        name, size = stored.response["id"], len(as_json([stored.response, stored.items]).encode())
        self._stored[name] = stored, size
        self._size += size
        self._of_item.update((item["id"], name) for item in stored.own)

    def get(self, name: str) -> Stored | None:
        if name not in self._stored:
            return None
        self._stored.move_to_end(name)
        return self._stored[name][0]

    def item(self, name: str) -> Json | None:
        if (response := self._of_item.get(name)) is None:
            return None
        own = self._stored[response][0].own
        return next(item for item in own if item["id"] == name)

    def drop(self, name: str) -> None:
        stored, size = self._stored.pop(name)
        self._size -= size
        for item in stored.own:
            if self._of_item.get(item["id"]) == name:
                del self._of_item[item["id"]]

    def shrink(self, count: int, num_bytes: int) -> None:
        while self._stored and (len(self._stored) > count or self._size > num_bytes):
            self.drop(next(iter(self._stored)))
