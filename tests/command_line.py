"""The command line run in this process."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from jackfield.cli import run


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def assert_failed(self, code: int, text: str) -> None:
        """Assert that it failed with this one line and wrote nothing else."""
        assert (self.code, self.out) == (code, ""), self
        assert re.fullmatch(rf"error: .*{re.escape(text)}.*\n", self.err), self.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Cli = Callable[..., Done]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in this process; `stdin` is what is piped into it, None a terminal."""

    # main() asks for this by an environment variable, before transformers is imported
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.disabled", True)

    def call(*arguments: str, stdin: str | bytes | None = None) -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        piped = Terminal() if data is None else io.TextIOWrapper(io.BytesIO(data))
        monkeypatch.setattr(sys, "stdin", piped)
        capfd.readouterr()
        code = run(arguments)
        return Done(code, *capfd.readouterr())

    return call
