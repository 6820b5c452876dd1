"""Images at web addresses: what is fetched, from whom, and what is not."""

from __future__ import annotations

import gzip
import io
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import extras
import pytest

import jackfield
from jackfield.bridge import image_hosts, image_parts
from jackfield.bridge.image_hosts import ImageHosts, hosts_of
from jackfield.bridge.image_parts import opened, taken_out
from jackfield.errors import PromptError, UsageError

with extras.imports():
    from PIL import Image
    from seeing import build, chat, picture


def png(color: tuple[int, int, int] = (9, 99, 199)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 7), color).save(file, "PNG")
    return file.getvalue()


Site = dict[str, Callable[[BaseHTTPRequestHandler], None]]


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def site(asked: list[str]) -> Iterator[tuple[str, Site]]:
    """A site on this machine, and what it does at each path; `asked` notes the paths."""
    pages: Site = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            pages[self.path](self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", pages
    server.shutdown()
    server.server_close()


def page(
    data: bytes, status: int = 200, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def say(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(data)

    return say


def read(address: str, *hosts: str, key: str = "url") -> Any:
    _, ((where, value),) = taken_out(
        [{"role": "user", "content": [{"type": "image", key: address}]}]
    )
    return opened(where, value, hosts=hosts_of(hosts))


@pytest.mark.parametrize("key", ["url", "image", "path"])
def test_an_image_of_an_allowed_host_is_fetched(site: tuple[str, Site], key: str) -> None:
    base, pages = site
    pages["/a.png?size=2"] = page(png())
    found = read(f"{base}/a.png?size=2#there", base, key=key)
    assert found.digest == opened("here", png()).digest


def test_redirects_stay_among_allowed_hosts(site: tuple[str, Site], asked: list[str]) -> None:
    base, pages = site
    pages |= {
        "/relative": page(b"", 302, Location="a.png"),
        "/again": page(b"", 301, Location=f"{base}/relative"),
        "/circle": page(b"", 302, Location="/circle"),
        "/out": page(b"", 302, Location="http://localhost:1/secret"),
        "/file": page(b"", 302, Location="file:///etc/hostname"),
        "/a.png": page(png()),
    }
    assert read(f"{base}/again", base).digest == opened("here", png()).digest
    assert asked == ["/again", "/relative", "/a.png"]
    with pytest.raises(PromptError, match="redirects more than 3 times"):
        read(f"{base}/circle", base)
    assert len(asked) == 3 + 4
    for path, there in (("/out", "'localhost:1'"), ("/file", "file")):
        with pytest.raises(PromptError, match=f"images are fetched from {base}.*{there}"):
            read(base + path, base)


@pytest.mark.parametrize(
    "address",
    [
        "http://localhost:{port}/a.png",  # another name of the same machine
        "https://127.0.0.1:{port}/a.png",
        "http://127.0.0.1/a.png",
        "http://127.0.0.1:{port}@example.org/a.png",
        "http://user@127.0.0.1:{port}/a.png",
        "http://[::ffff:127.0.0.1]:{port}/a.png",
        "http://127.0.0.1:{port}.example.org/a.png",
        "http://127.1:{port}/a.png",
        "http:///a.png",
        "http://127.0.0.1:99999999/a.png",
        "http://\x00/a.png",
        "HTTP://127.0.0.2:{port}/",
    ],
)
def test_no_other_address_is_asked(site: tuple[str, Site], asked: list[str], address: str) -> None:
    base, pages = site
    pages["/a.png"] = page(png())
    with pytest.raises(PromptError, match=r"^message 0, part 0: "):
        read(address.format(port=base.rpartition(":")[2]), base)
    assert not asked


def test_an_answer_is_whole_short_and_soon(
    site: tuple[str, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, pages = site
    monkeypatch.setattr(image_parts, "MOST_BYTES", 5000)
    monkeypatch.setattr(image_hosts, "WITHIN", 0.5)
    monkeypatch.setattr(image_hosts, "SILENCE", 0.3)

    def drips(request: BaseHTTPRequestHandler) -> None:
        page(b"")(request)
        for _ in range(30):
            request.wfile.write(b".")
            request.wfile.flush()
            time.sleep(0.05)

    def trickle(begin: bytes, more: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
        """Bytes, one by one, that are no part of an image."""

        def send(request: BaseHTTPRequestHandler) -> None:
            request.wfile.write(begin)
            for _ in range(60):
                request.wfile.write(more)
                request.wfile.flush()
                time.sleep(0.05)

        return send

    pages |= {
        "/headers": trickle(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
        "/early": trickle(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        "/chunk": trickle(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;", b"a"),
        "/absent": page(b"<html>", 404),
        "/text": page(b"no image"),
        "/long": page(b"x" * 5001),
        "/cut": page(png()[:40], Content_Length=str(len(png()))),
        "/packed": page(gzip.compress(bytes(10**6)), Content_Encoding="gzip"),
        "/drips": drips,
        "/silent": lambda _: time.sleep(1),
        "/nothing": page(b""),
    }
    for path, why in (
        ("/absent", "answers 404"), ("/text", "these bytes are no image"),
        ("/long", "sends more than 5000 bytes"), ("/cut", "cannot be fetched"),
        ("/packed", "sends the image packed"), ("/drips", "takes longer than 0.5 s"),
        *((path, "takes longer than 0.5 s") for path in ("/headers", "/early", "/chunk")),
        ("/silent", "cannot be fetched: timed out"), ("/nothing", "these bytes are no image"),
    ):  # fmt: skip
        began = time.monotonic()
        with pytest.raises(PromptError, match=f"^message 0, part 0: .*{why}"):
            read(base + path, base)
        assert time.monotonic() - began < 2.5, path
    with pytest.raises(PromptError, match=r"cannot be fetched: .*refused"):
        read("http://127.0.0.1:9/a.png", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "value"), [("SSL_CERT_FILE", "/nonexistent"), ("ALL_PROXY", "socks9://nowhere")]
)
def test_an_environment_that_makes_no_client_is_told(
    site: tuple[str, Site], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(PromptError, match=r"^message 0, part 0: .* cannot be fetched: "):
        read(f"{site[0]}/a.png", site[0])


def test_names_of_hosts() -> None:
    hosts = ImageHosts(["Example.org", "example.com:8443", "http://intern", "bücher.example"])
    assert hosts._hosts == {
        ("https", "example.org", 443), ("https", "example.com", 8443), ("http", "intern", 80),
        ("https", "xn--bcher-kva.example", 443),
    }  # fmt: skip
    for wrong in (
        "", "*", "*.example.org", "ftp://example.org", "example.org/images", "https://a?b",
        "me@example.org", "a b", "x.org:0", "https://", "example.org:x", "https://a#b",
    ):  # fmt: skip
        with pytest.raises(UsageError, match="is no host"):
            ImageHosts([wrong])
    for value in ("example.org", 7, [3]):
        with pytest.raises(UsageError, match="image_hosts"):
            hosts_of(value)
    assert hosts_of(None) is hosts_of([]) is None


def test_an_engine_fetches_what_it_is_loaded_with(site: tuple[str, Site]) -> None:
    base, pages = site
    file = io.BytesIO()
    picture(0).save(file, "PNG")
    pages["/one.png"] = page(file.getvalue())
    model, processor = build("llava")
    content = [{"type": "image_url", "image_url": {"url": f"{base}/one.png"}}]
    asked = [{"role": "user", "content": content}]
    with jackfield.load(model, tokenizer=processor, image_hosts=[base]) as engine:
        found, own = engine.generate([asked, chat(picture(0))], max_new_tokens=5, do_sample=False)
        assert found.token_ids == own.token_ids
    with (
        jackfield.load(model, tokenizer=processor) as engine,
        pytest.raises(PromptError, match=f"nothing is fetched from '{base}/one.png'"),
    ):
        engine.generate([asked])
    with pytest.raises(UsageError, match="reads no images, so there is nothing to fetch"):
        jackfield.load("demo", image_hosts=["example.org"])
