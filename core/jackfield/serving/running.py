"""A server process: a socket, signals, and the loop of uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from jackfield.errors import UsageError, shown
from jackfield.serving.app import create_app
from jackfield.serving.connections import configured
from jackfield.serving.pool import Pool
from jackfield.serving.settings import ServerSettings

logger = logging.getLogger("jackfield.serving")


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains: nobody new is let in, answers are finished, and the
    process ends well. A second one ends it at once, whatever hangs.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            logger.error("stopped by a second signal; answers are cut off")
            os._exit(128 + sig)
        logger.info("draining: answers are finished; a second signal stops at once")
        self.should_exit = True


def serve(settings: ServerSettings, say: Callable[[str], None]) -> None:
    """Serve until a signal comes. `say` is told, line by line, what a person wants to know.

    Raises UsageError, before any model is loaded, where the address or the certificate is no good.
    """
    check_certificate(settings)
    allow_files(settings.max_connections + 1024)
    with bound(settings) as listening:
        app = create_app(settings)
        config = configured(app, settings, app.state.metrics)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop's, if there
            runner.run(_serve(Server(config), app.state.pool, listening, settings, say))


async def _serve(
    server: Server,
    pool: Pool,
    listening: socket.socket,
    settings: ServerSettings,
    say: Callable[[str], None],
) -> None:
    if settings.preloads:
        await pool.preload(say)
    say(f"serving {', '.join(pool.models)} at {url(listening, settings)} (Ctrl-C drains and ends)")
    await server.serve(sockets=[listening])


def url(listening: socket.socket, settings: ServerSettings) -> str:
    """Where clients find a server that listens there."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def bound(settings: ServerSettings) -> Iterator[socket.socket]:
    """A socket that listens. Raises UsageError where the address cannot be had."""
    host, port = settings.host.strip("[]"), settings.port
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        made = socket.socket(family)
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        why = getattr(error, "strerror", None) or shown(error)
        raise UsageError(f"cannot serve at {shown(host)}: {why}") from None
    with made:
        if sys.platform != "win32":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
            made.listen(2048)
        except OSError as error:
            raise UsageError(
                f"cannot serve at {host} port {port}: {error.strerror}; choose another with --port"
            ) from None
        yield made


def allow_files(count: int) -> None:
    """Have the process open so many files, as far as the system lets it: each client is one."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such bound
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_certificate(settings: ServerSettings) -> None:
    """Raise UsageError for a certificate and a key that cannot be read, or do not fit."""
    if settings.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # a key with a passphrase is no good: nobody is there to be asked for it
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=str)
    except (OSError, ValueError) as error:
        pair = f"{settings.ssl_certfile} and {settings.ssl_keyfile}"
        raise UsageError(
            f"the certificate and the key ({pair}) are no good: {shown(error)}"
        ) from None
