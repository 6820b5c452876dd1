"""A server in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jackfield
from jackfield.engine.engine import Engine
from jackfield.serving.app import create_app
from jackfield.serving.connections import configured
from jackfield.serving.pool import Pool
from jackfield.serving.running import Server, bound
from jackfield.serving.settings import ServerSettings, settings

if TYPE_CHECKING:
    import uvicorn

DEMO = {"demo": {"model": "demo"}}


@dataclass
class Served:
    """`url` without a path; `pool` and `settings` are the server's own, `loop` is where it runs."""

    url: str
    pool: Pool
    settings: ServerSettings
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def engine(self) -> Engine:
        """That of the only model, once it is loaded."""
        (served,) = self.pool.models.values()
        assert served.engine is not None
        return served.engine


@contextlib.contextmanager
def serving(load: Callable[..., Engine] = jackfield.load, **given: Any) -> Iterator[Served]:
    """Serve at a port that is free until the block is left."""
    found = settings(**{"port": 0, "models": DEMO, **given})
    app = create_app(found, load)
    with bound(found) as listening:
        config = configured(app, found, app.state.metrics)
        server = Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await _serve(server, app.state.pool, found.preloads, listening)

        def run_it() -> None:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(serve())

        thread = threading.Thread(target=run_it, name="server")
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.01)
        host, port = listening.getsockname()[:2]
        try:
            yield Served(f"http://{host}:{port}", app.state.pool, found, server, loops[0])
        finally:
            server.should_exit = True
            thread.join(60)


async def _serve(server: uvicorn.Server, pool: Pool, preload: bool, listening: Any) -> None:
    if preload:
        for model in pool.models.values():
            async with model.lease():
                pass
    await server._serve([listening])  # without its handlers of signals, which threads may not set
