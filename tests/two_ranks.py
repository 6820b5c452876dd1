"""Two processes that share one model after the other: whoever tests is rank 0, this file rank 1.

Starting a process takes seconds, so that one of them serves many tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from packaging.version import Version

import jackfield
from jackfield.engine.engine import Engine

#: transformers before 5.21 puts the outputs of processes together where they are of one size only
UNEVEN = Version(transformers.__version__) >= Version("5.21")
Load = Callable[..., contextlib.AbstractContextManager[Engine]]


@contextlib.contextmanager
def two_ranks() -> Iterator[Load]:
    """Yields what stands for `jackfield.load`, with arguments that are JSON, in both ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, **world, "RANK": "1", "LOCAL_RANK": "1"},
        stdin=subprocess.PIPE,
    ) as other:
        assert other.stdin is not None
        lines = other.stdin

        @contextlib.contextmanager
        def load(model: Path | str, **arguments: Any) -> Iterator[Engine]:
            given = {"model": str(model), "tp_plan": "auto", **arguments}
            lines.write(f"{json.dumps(given)}\n".encode())
            lines.flush()
            here = {**world, "RANK": "0", "LOCAL_RANK": "0"}
            with patch.dict(os.environ, here), jackfield.load(**given) as engine:
                yield engine

        yield load
        lines.close()
        assert other.wait(30) == 0


def follow() -> None:
    """Rank 1: load what the lines of standard input say, until there are no more."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        with contextlib.suppress(SystemExit, jackfield.JackfieldError):
            jackfield.load(**json.loads(line))


if __name__ == "__main__":
    follow()
