"""A server of bytes, for tests that say what it answers and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import extras
import pytest
from fakes import Fake, Script


def pytest_pycollect_makemodule() -> None:
    """Skip the whole folder."""
    extras.needs("httpx", "httptools")


@pytest.fixture
def fake() -> Iterator[Callable[[Script], Fake]]:
    """Start a server: `fake(script)`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake")
    thread.start()
    servers = []

    def start(script: Script) -> Fake:
        made = Fake(script)
        begin = asyncio.start_server(made.answer, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(begin, loop).result()
        servers.append(server)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        return made

    async def end() -> None:
        for server in servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    yield start
    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
