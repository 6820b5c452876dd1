"""The page at ``/``: a chat, the plan, and what the engines do now; nothing of it is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from fastapi import FastAPI

_FOLDER = Path(__file__).parent
_KINDS = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip
#: The page loads what stands beside it and asks this server; nothing else, whatever a model says.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page at ``/`` and its parts under ``/page/``; they are read now, once."""
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _KINDS:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            app.router.routes.append(_route(path, file.read_bytes(), _KINDS[file.suffix]))


def _route(path: str, content: bytes, kind: str) -> Route:
    async def part(request: object) -> Response:
        return Response(content, headers={**_HEADERS, "Content-Type": kind})

    return Route(path, part, methods=["GET"], include_in_schema=False)
