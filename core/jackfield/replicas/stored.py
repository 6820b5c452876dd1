"""Which replica has which stored responses, as their ids went by."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from typing import Any

PATH = "/v1/responses"
_MOST = 200_000  # ids that are remembered
_TOLD = re.compile(rb'"id": ?"([a-z]+_[0-9a-f]{16,})"')
_ASKED = re.compile(r"[a-z]+_[0-9a-f]{16,}")


class StoredIds:
    """Ids of responses and of their items; those that nobody has asked for lately go first."""

    def __init__(self) -> None:
        self._replica: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replica)

    def told(self, replica: str, body: bytes) -> None:
        """What a replica says has these ids in it."""
        for found in _TOLD.findall(body):
            self._keep(found.decode(), replica)

    def replica_of(self, path: str, asked: dict[str, Any]) -> str | None:
        """Who has what a request is about: the response in its path or body, or an item."""
        if not path.startswith(PATH):
            return None
        items = asked.get("input")
        given = items if isinstance(items, list) else []
        ids = [item.get("id") for item in given if isinstance(item, dict)]
        about = path + json.dumps([asked.get("previous_response_id"), ids])
        for name in _ASKED.findall(about):
            if (replica := self._replica.get(name)) is not None:
                self._keep(name, replica)
                return replica
        return None

    def _keep(self, name: str, replica: str) -> None:
        self._replica[name] = replica
        self._replica.move_to_end(name)
        if len(self._replica) > _MOST:
            self._replica.popitem(last=False)
