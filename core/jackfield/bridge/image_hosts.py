"""Images at web addresses: fetched from the hosts that a caller allows, and from no other.

A request may name any address, also one inside of the network that the server is in. So hosts are
named when a model is loaded, each redirect is looked at like the first address, and an answer may
neither be long nor slow.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from jackfield.errors import PromptError, UsageError, first_line, quoted

if TYPE_CHECKING:
    import httpx

WITHIN = 15.0  # seconds for an image, redirects included
SILENCE = 5.0  # seconds without a byte
REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")  # in ASCII, or an IPv6 address
_INSTALL = "images at web addresses need httpx: pip install 'jackfield[vision]'"


class Host(NamedTuple):
    """What of an address says where it is asked for."""

    scheme: str
    name: str
    port: int


def is_web(text: str) -> bool:
    """Whether a text is an address that `ImageHosts` may know."""
    return text.lower().startswith(("http://", "https://"))


class ImageHosts:
    """Hosts that images may be fetched from: each "HOST" or "HOST:PORT" (https), or an address
    without a path ("http://HOST:PORT"). Raises UsageError for what is none.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._hosts = frozenset(map(_host, self._names))

    def fetch(self, where: str, address: str, most: int) -> bytes:
        """The bytes at an address, at most `most`. Raises PromptError, which begins with `where`.

        The address may redirect to allowed hosts, `REDIRECTS` times.
        """
        import httpx

        end = time.monotonic() + WITHIN
        try:
            with httpx.Client(timeout=SILENCE, headers=_HEADERS) as client, _closing(client):
                url = self._allowed(where, httpx.URL(address))
                for _ in range(REDIRECTS + 1):
                    with client.stream("GET", url) as answer:
                        if not answer.has_redirect_location:
                            return _body(where, answer, most)
                        url = self._allowed(where, url.join(answer.headers["location"]))
        except PromptError:
            raise
        except Exception as error:  # the network's, an address's, or what a closed client raises
            why = first_line(error) or type(error).__name__
            late = time.monotonic() >= end
            raise PromptError(
                f"{where}: {quoted(address)} cannot be fetched: "
                + (f"it takes longer than {WITHIN:g} s" if late else why[:200])
            ) from error
        raise PromptError(f"{where}: {quoted(address)} redirects more than {REDIRECTS} times")

    def _allowed(self, where: str, url: httpx.URL) -> httpx.URL:
        if url.userinfo:
            raise PromptError(f"{where}: an address of an image has no user and no password")
        if _of(url) not in self._hosts:
            known = ", ".join(self._names)
            raise PromptError(
                f"{where}: images are fetched from {known}, and {quoted(str(url))} is at "
                f"{quoted(url.netloc.decode('ascii', 'replace'))} ({url.scheme or 'no scheme'}); "
                "fetch it, and give the image itself"
            )
        return url.copy_with(fragment=None)


# What is sent packed could be unpacked to any length.
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "jackfield"}


def hosts_of(given: object) -> ImageHosts | None:
    """Those of the argument `image_hosts`; None: it allows none. Raises UsageError."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(
            f"image_hosts is a list of hosts, as in ['example.org'], not {quoted(given)}"
        )
    names = list(given)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"image_hosts: a host is a text, not {quoted(name)}")
    if not names:
        return None
    try:
        import httpx
    except ImportError:
        raise UsageError(_INSTALL) from None
    del httpx
    return ImageHosts(names)


@contextlib.contextmanager
def _closing(client: httpx.Client) -> Iterator[None]:
    """Have what a client reads fail once `WITHIN` has passed, wherever it waits for bytes."""
    timer = threading.Timer(WITHIN, client.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _host(name: str) -> Host:
    import httpx

    text = name if "://" in name else f"https://{name}"
    try:
        url = httpx.URL(text)
        found = _of(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"image_hosts: {quoted(name)} is no host: {first_line(error)}") from None
    plain = found.port and url.raw_path in (b"", b"/") and not (url.userinfo or url.fragment)
    if found.scheme not in _PORTS or not _NAME.fullmatch(found.name) or not plain:
        raise UsageError(
            f"image_hosts: {quoted(name)} is no host; write HOST, HOST:PORT or http://HOST:PORT, "
            "each by its whole name"
        )
    return found


def _of(url: httpx.URL) -> Host:
    return Host(
        url.scheme,
        url.raw_host.decode("ascii").lower(),
        _PORTS.get(url.scheme, 0) if url.port is None else url.port,
    )


def _body(where: str, answer: httpx.Response, most: int) -> bytes:
    """What an answer brings. Raises PromptError for another answer than a whole, short one."""
    host = quoted(answer.url.host)
    if answer.status_code != 200:
        raise PromptError(f"{where}: {host} answers {answer.status_code} for the image")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise PromptError(f"{where}: {host} sends the image packed, which was not asked for")
    data = bytearray()
    for piece in answer.iter_raw():
        data += piece
        if len(data) > most:
            raise PromptError(f"{where}: {host} sends more than {most} bytes, which are the most")
    return bytes(data)
