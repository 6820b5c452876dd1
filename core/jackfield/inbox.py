"""What a request's reader has not read yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jackfield.bridge.source import first_line
from jackfield.errors import ExecutionError, JackfieldError
from jackfield.sequences import Delta


@dataclass
class Inbox:
    """The deltas that are still to be read, and why nothing more will come after them."""

    deltas: deque[Delta] = field(default_factory=deque)
    failure: BaseException | None = None

    def error(self) -> JackfieldError:
        """`failure` as an error of our tree, on one line, with its cause chained."""
        if isinstance(self.failure, JackfieldError):
            return self.failure
        assert self.failure is not None
        what = f"{type(self.failure).__name__}: {first_line(self.failure)}"
        error = ExecutionError(f"the model failed: {what}")
        error.__cause__ = self.failure
        return error
