"""What the server adds to what a body asks for: its own defaults, and who asks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jackfield.engine.engine import Engine
from jackfield.serving.settings import ServerSettings


def _name() -> str:
    return uuid.uuid4().hex


def _now() -> int:
    return int(time.time())


@dataclass(frozen=True)
class Asking:
    """Who asks, and the server's settings that bear on it.

    All ids in the answer are made of `id`, and all times in it are told by `now`, in whole seconds
    since 1970.
    """

    settings: ServerSettings
    owner: str
    id: str = field(default_factory=_name)
    now: Callable[[], int] = _now

    def completed(self, asked: dict[str, Any]) -> dict[str, Any]:
        """`asked` with the server's defaults; what others have cached is not found by it."""
        found = dict(asked)
        if self.settings.deadline is not None:
            found["deadline"] = self.settings.deadline
        if self.settings.default_seed is not None:
            found.setdefault("seed", self.settings.default_seed)
        if found.get("seed") == -1:  # by which llama.cpp, Ollama and vLLM mean any
            del found["seed"]
        salt = found.pop("cache_salt", "")
        if self.owner or salt:  # a length, so that no owner and salt together are another pair
            found["cache_salt"] = f"{len(self.owner)}:{self.owner}{salt}"
        return found

    def length(self, wanted: int | None, engine: Engine) -> dict[str, Any]:
        """How long a text may become: as was asked, or as the server says, or the whole context."""
        if wanted is not None:
            return {"max_new_tokens": wanted}
        context = engine.plan.requirements.context_length
        most = self.settings.max_completion_tokens
        if context is None:
            return {} if most is None else {"max_new_tokens": most}
        return {"max_length": context} if most is None else {"max_new_tokens": most}
