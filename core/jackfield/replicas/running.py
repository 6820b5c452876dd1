"""`jackfield serve --replicas`: a server in this process, whose models are in processes of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import ssl
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jackfield.errors import UsageError
from jackfield.replicas.asked import anywhere, busy, check
from jackfield.replicas.cluster import Cluster, Count, Deployment, joined
from jackfield.replicas.front import create_front
from jackfield.replicas.replica import versions
from jackfield.serving.connections import configured
from jackfield.serving.metrics import Metrics
from jackfield.serving.running import Server, allow_files, bound, check_certificate, url
from jackfield.serving.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

#: Settings that the process in front reads; the rest bear on replicas alone.
_IN_FRONT = (
    "allowed_hosts", "cors_origins", "drain", "host", "keys", "max_body", "max_connections",
    "max_depth", "max_requests", "receive_timeout", "ssl_certfile", "ssl_keyfile",
    "write_timeout",
)  # fmt: skip
_ASKED_WITHIN = 5.0  # seconds for a server at a port to say who it is

Say = Callable[[str], None]


def serve(settings: ServerSettings, count: Count, address: str | None, say: Say) -> None:
    """Serve by `count` replicas until a signal comes; `say` is told what a person wants to know.

    `address` is that of a cluster of Ray, None: one of this machine's own. Where a server runs at
    the same port of the same cluster, its replicas are replaced, and this returns.
    Raises UsageError where there is no cluster, no room or no port, ExecutionError where a replica
    does not start.
    """
    check(settings)
    settings = anywhere(settings)
    check_certificate(settings)
    allow_files(settings.max_connections + 1024)
    with contextlib.ExitStack() as stack:
        listening, taken = None, None
        try:
            listening = stack.enter_context(bound(settings))
        except UsageError as error:
            if address is None or not (taken := _running(settings)):
                raise error from None
        cluster = stack.enter_context(joined(address))
        if listening is not None:
            _serve(settings, count, cluster, listening, say)
        elif taken is not None:
            _replace(settings, count, cluster, taken, say)


def _serve(
    settings: ServerSettings, count: Count, cluster: Cluster, listening: socket.socket, say: Say
) -> None:
    from jackfield.replicas.on_ray import RayReplicas

    name = f"jackfield-{socket.gethostname()}-{listening.getsockname()[1]}"
    asked = Deployment(name, settings, count, busy(settings))
    handle = cluster.deploy(asked, versions())
    try:
        for plan in handle.plans.remote().result(timeout_s=60):
            say(plan)
        metrics = Metrics()
        app = create_front(settings, RayReplicas(handle, cluster.host), metrics)
        app.state.running = {"deployment": asked.name, "settings": _digest(settings)}
        found = f"{cluster.replicas(asked.name)} replicas"
        where = url(listening, settings)
        say(f"serving {', '.join(settings.models)} by {found} at {where} (Ctrl-C drains and ends)")
        _until_a_signal(app, settings, metrics, listening)
    finally:
        cluster.delete(asked.name)


def _until_a_signal(
    app: Starlette, settings: ServerSettings, metrics: Metrics, listening: socket.socket
) -> None:
    config = configured(app, settings, metrics)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(Server(config).serve(sockets=[listening]))


def _replace(
    settings: ServerSettings, count: Count, cluster: Cluster, running: dict[str, Any], say: Say
) -> None:
    name = str(running["deployment"])
    where = f"{settings.host} port {settings.port}"
    if not cluster.has(name):
        raise UsageError(
            f"cannot serve at {where}: a server of another cluster is there; choose another port "
            "with --port"
        )
    if running["settings"] != _digest(settings):
        raise UsageError(
            f"the server at {where} has other keys, bounds or addresses, which only it itself can "
            "change; end it and start it anew, or leave them as they are"
        )
    cluster.deploy(Deployment(name, settings, count, busy(settings)), versions())
    say(f"replaced: {cluster.replicas(name)} replicas; the server at {where} goes on")


def _running(settings: ServerSettings) -> dict[str, Any] | None:
    """What a server in front of replicas says of itself that listens where we would."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    asked = f"{scheme}://{settings.host}:{settings.port}/health/live"
    unchecked = ssl._create_unverified_context()  # nothing is told
    ask = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unchecked)
    ).open
    try:
        with ask(asked, timeout=_ASKED_WITHIN) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"deployment", "settings"} <= found.keys() else None


def _digest(settings: ServerSettings) -> str:
    told = settings.model_dump(mode="json", include=set(_IN_FRONT))
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
