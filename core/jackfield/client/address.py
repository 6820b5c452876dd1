"""Where a server is, and what is said when it does not answer as one."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from jackfield.errors import ExecutionError, JackfieldError, PromptError, UsageError, quoted, shown

CONNECT_WITHIN = 10.0  # seconds
SILENCE = 600.0  # seconds without a byte after which an answer is given up


@dataclass(frozen=True)
class Address:
    """The base of an API (``http://host:8000/v1``) and the key for it, if it wants one."""

    base: str
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Address:
        """`url` with what people leave out: http:// and /v1. Raises UsageError."""
        text = url.strip() if "://" in url else f"http://{url.strip()}"
        try:
            parts = urlsplit(text)
            _ = parts.port, httpx.URL(text)  # which check it
        except (ValueError, httpx.InvalidURL) as error:
            raise UsageError(f"{quoted(url)} is no address of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{quoted(url)} is no address of a server; write http://HOST:PORT or https://…"
            )
        if parts.query or parts.fragment or parts.username is not None:
            raise UsageError(
                f"{quoted(url)}: an address has a host, a port and a path and nothing else; a key "
                "goes into --api-key"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("the API key has characters that no header can have")
        path = parts.path.rstrip("/") or "/v1"
        return cls(f"{parts.scheme}://{parts.netloc}{path}", api_key)

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.base)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def is_loopback(self) -> bool:
        host = self.parts.hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def client(self) -> httpx.Client:
        """For requests one after the other; proxies of the environment are for other machines."""
        return httpx.Client(
            headers=self.headers,
            timeout=httpx.Timeout(SILENCE, connect=CONNECT_WITHIN),
            trust_env=not self.is_loopback,
        )

    def unreachable(self, error: httpx.HTTPError) -> JackfieldError:
        """The error for a request that got no answer, or half of one."""
        why = shown(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return UsageError(f"nothing answers at {self.base}: {why}; is the server running?")
        if isinstance(error, httpx.TimeoutException):
            return ExecutionError(f"{self.base} has said nothing for {SILENCE:g} s")
        return ExecutionError(f"the answer of {self.base} was cut off: {why}")

    def models(self, client: httpx.Client) -> list[str]:
        """The names that the server lists. Raises JackfieldError."""
        try:
            response = client.get(f"{self.base}/models")
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        if response.is_error:
            raise refusal(self, response.status_code, response.content)
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise no_such_server(self, response) from None

    def only_model(self, client: httpx.Client) -> str:
        """The one that there is. Raises UsageError where there are several, or none."""
        names = self.models(client)
        if len(names) != 1:
            raise UsageError(f"at {self.base} there are {_listed(names)}; name one model")
        return names[0]


def _listed(names: Iterable[str]) -> str:
    found = [shown(name) for name in names]
    more = f" and {len(found) - 20} more" if len(found) > 20 else ""
    return f"{', '.join(found[:20])}{more}" if found else "no models"


def no_such_server(address: Address, response: httpx.Response) -> UsageError:
    kind = response.headers.get("content-type", "nothing that says what it is")
    return UsageError(
        f"{address.base} does not speak OpenAI's protocol: it answered {response.status_code} with "
        f"{shown(kind)}; give the address that clients have as base_url"
    )


def refusal(
    address: Address, status: int, body: bytes, model: str | None = None, names: Any = ()
) -> JackfieldError:
    """The error for an answer that is none; `names` are the models that there are."""
    error = told(body)
    said = shown(error.get("message", ""), 500) or f"HTTP status {status}"
    if status in (401, 403):
        return UsageError(f"{address.base} wants an API key: {said}; give --api-key")
    if status == 404 and names:
        return UsageError(
            f"there is no model {quoted(model)} at {address.base}; there are {_listed(names)}"
        )
    if not error:
        return UsageError(
            f"{address.base} does not speak OpenAI's protocol: it answered with status {status}; "
            "give the address that clients have as base_url"
        )
    if error.get("code") == "context_length_exceeded" or "context length" in said:
        return PromptError(said)
    if status == 429 or status >= 500:
        return ExecutionError(f"{address.base} cannot answer now ({status}): {said}")
    return UsageError(f"{address.base} refuses ({status}): {said}")


def told(body: bytes) -> dict[str, Any]:
    """What an error's body says: ``message``, perhaps ``code``; empty where it is none of ours."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    error = found.get("error", found.get("detail", found.get("message")))
    if isinstance(error, dict):
        return error
    return {"message": error if isinstance(error, str) else json.dumps(error)} if error else {}
