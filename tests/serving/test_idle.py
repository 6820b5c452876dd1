"""Connections that ask nothing cost nobody anything."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from jackfield.serving.running import allow_files

if TYPE_CHECKING:
    from openai import OpenAI
    from served import Served


@pytest.mark.parametrize("count", [500, pytest.param(9_000, marks=pytest.mark.long)])
def test_idle_connections_are_held(server: Served, client: OpenAI, count: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_files(2 * count + 1024)  # both ends are in this process
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * count + 512:
        pytest.skip(f"{before[1]} files may be open here at most")
    address = urlsplit(server.url)
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(count):
            held.enter_context(
                socket.create_connection((str(address.hostname), int(address.port or 0)))
            )
        found = client.completions.create(model="demo", prompt="One day", max_tokens=4)
        assert found.choices[0].text
        assert len(server.server.server_state.connections) >= count
