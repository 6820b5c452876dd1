"""A hub on this machine: folders of models, served as huggingface_hub asks for them.

Each request is noted, with the bytes that were sent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "c" * 40


@dataclass
class LocalHub:
    """`root` has a folder OWNER/NAME for each model; `ranges`: it sends parts of files."""

    root: Path
    ranges: bool = True
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    endpoint: str = ""

    def sent(self, name: str) -> int:
        """The bytes of files of this name that were sent since `forget`."""
        return sum(size for _, path, size in self.asked if path.endswith(f"/{name}"))

    def forget(self) -> None:
        self.asked.clear()


@contextmanager
def serving(root: Path) -> Iterator[LocalHub]:
    hub = LocalHub(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            answer(self, hub)

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            del arguments

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: Any) -> None:
            del arguments  # of who has gone

    server = Server(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(request: BaseHTTPRequestHandler, hub: LocalHub) -> None:
    path = request.path.partition("?")[0]
    if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
        return listing(request, hub, found[1])
    if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
        return content(request, hub, hub.root / found[1], found[2])
    if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(/.+)?", path):
        return tree(request, hub, found[1], found[2])
    return send(request, hub, 404, {"X-Error-Code": "RepoNotFound"}, b"")


def files_of(hub: LocalHub, repo: str) -> list[Path]:
    return sorted(path for path in (hub.root / repo).rglob("*") if path.is_file())


def listing(request: BaseHTTPRequestHandler, hub: LocalHub, repo: str) -> None:
    siblings = [{"rfilename": path.name} for path in files_of(hub, repo)]
    body = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}).encode()
    send(request, hub, 200 if siblings else 404, {"X-Repo-Commit": COMMIT}, body)


def tree(request: BaseHTTPRequestHandler, hub: LocalHub, repo: str, below: str | None) -> None:
    if below:
        return send(request, hub, 404, {"X-Error-Code": "EntryNotFound"}, b"")
    told = [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
        for path in files_of(hub, repo)
    ]
    return send(request, hub, 200, {"X-Repo-Commit": COMMIT}, json.dumps(told).encode())


def content(request: BaseHTTPRequestHandler, hub: LocalHub, folder: Path, name: str) -> None:
    file = folder / name
    headers = {"X-Repo-Commit": COMMIT}
    if not folder.is_dir():
        return send(request, hub, 404, {"X-Error-Code": "RepoNotFound"}, b"")
    if not file.is_file():
        return send(request, hub, 404, headers | {"X-Error-Code": "EntryNotFound"}, b"")
    whole = file.read_bytes()
    headers |= {"ETag": f'"{hashlib.sha256(whole).hexdigest()}"', "Accept-Ranges": "bytes"}
    part = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if not part or not hub.ranges:
        return send(request, hub, 200, headers, whole)
    start, end = int(part[1]), min(int(part[2] or len(whole)), len(whole) - 1)
    headers["Content-Range"] = f"bytes {start}-{end}/{len(whole)}"
    return send(request, hub, 206, headers, whole[start : end + 1])


def send(
    request: BaseHTTPRequestHandler, hub: LocalHub, code: int, headers: dict[str, str], body: bytes
) -> None:
    wanted = request.command != "HEAD"
    hub.asked.append((request.command, request.path, len(body) if wanted else 0))
    request.send_response(code)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if wanted:
        with suppress(ConnectionError):  # who asked has read enough
            request.wfile.write(body)
