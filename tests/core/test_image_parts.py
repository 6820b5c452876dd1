"""Images of messages: what is opened, and by which name what is not."""

from __future__ import annotations

import base64
import gc
import io
import re
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import extras
import pytest

from jackfield.bridge import image_parts
from jackfield.bridge.image_parts import Picture, has_images, opened, taken_out
from jackfield.bridge.image_reader import ImageReader, ReadImage
from jackfield.bridge.quiet import LOADING
from jackfield.engine import prompt_images
from jackfield.engine.prompt_images import PromptImages
from jackfield.errors import PromptError

with extras.imports():
    from PIL import Image


def image(color: tuple[int, ...] = (200, 30, 60), size: tuple[int, int] = (12, 7)) -> Image.Image:
    found = Image.new("RGB", size, color)
    found.putpixel((3, 2), (0, 255, 0))
    return found


def stored(what: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    what.save(file, kind, **how)
    return file.getvalue()


def url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def parts(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def read(part: dict[str, Any]) -> Picture:
    messages, found = taken_out(parts(part))
    assert messages == parts({"type": "image"})
    ((where, value),) = found
    return opened(where, value)


def test_equal_images_have_one_name_however_they_are_given(tmp_path: Path) -> None:
    whole, path = image(), tmp_path / "an image.png"
    data = stored(whole)
    path.write_bytes(data)
    ways: list[dict[str, Any]] = [
        {"type": "image", "image": given}
        for given in (
            whole,
            data,
            bytearray(data),
            path,
            str(path),
            url(data),
            stored(whole, "BMP"),
        )
    ]
    ways += [{"type": "image", "path": str(path)}, {"type": "image", "url": url(data)}]
    ways += [{"type": "image_url", "image_url": url(data)}]
    ways += [{"type": "image_url", "image_url": {"url": url(data), "detail": "auto"}}]
    found = [read(way) for way in ways]
    assert len({one.digest for one in found}) == 1
    assert {one.image.mode for one in found} == {"RGB"}
    others = [
        image((200, 30, 61)),
        image(size=(7, 12)),
        whole.transpose(Image.Transpose.ROTATE_180),
    ]
    assert len({read({"type": "image", "image": one}).digest for one in [whole, *others]}) == 4


def test_data_urls_are_written_in_many_ways() -> None:
    data = stored(image())
    heads = ("DATA:image/png;base64,", "data:;base64,", "data:image/PNG;name=a;BASE64,")
    written = [url(data, head) for head in heads]
    written.append("data:image/png;base64," + base64.encodebytes(data).decode())
    for given in ("image", "url"):
        found = [read({"type": "image", given: one}) for one in (url(data), *written)]
        assert len({one.digest for one in found}) == 1


def test_a_cameras_jpeg_has_its_first_picture() -> None:
    """And further ones behind it, which are no film."""
    one, smaller = image(size=(40, 30)), image(size=(20, 15))
    data = stored(one, "MPO", save_all=True, append_images=[smaller])
    assert read({"type": "image", "image": data}).image.size == (40, 30)


def test_the_warnings_of_others_are_left_alone() -> None:
    before = list(warnings.filters)
    data = stored(image())
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(lambda _: opened("here", data), range(64)))) == 64
    assert warnings.filters == before


@pytest.mark.parametrize(
    ("prompt", "has"),
    [
        (parts({"type": "image", "image": b""}), True),
        ([{"role": "system", "content": "a"}, *parts({"type": "image_url"})], True),
        (tuple(parts("odd", {"type": "image"})), True),
        (parts({"type": "text", "text": "image"}), False),
        ([{"role": "user", "content": "image"}, {}, 7], False),
        ("image", False),
        ([1, 2], False),
        ([], False),
        (None, False),
    ],
)
def test_a_chat_with_an_image_is_known_by_its_parts(prompt: Any, has: bool) -> None:
    assert has_images(prompt) is has


@pytest.mark.parametrize("kind", image_parts.FORMATS)
def test_every_format_is_opened(kind: str) -> None:
    assert read({"type": "image", "image": stored(image(), kind)}).image.size == (12, 7)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    given = Image.new(mode, (5, 4))
    assert read({"type": "image", "image": given}).image.mode == "RGB"


def test_an_image_is_turned_as_its_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read({"type": "image", "image": stored(image(), "JPEG", exif=exif)}).image.size == (
        7,
        12,
    )


def test_the_images_of_a_chat_are_in_order() -> None:
    a, b, c = image((1, 1, 1)), image((2, 2, 2)), image((3, 3, 3))
    text = {"type": "text", "text": "and"}
    chat = [
        {"role": "system", "content": "be brief"},
        *parts({"type": "image", "image": a}, text, {"type": "image", "image": b}),
        {"role": "assistant", "content": "yes"},
        *parts(text, {"type": "image", "image": c}),
    ]
    messages, found = taken_out(chat)
    assert [value for _, value in found] == [a, b, c]
    assert [where for where, _ in found] == [
        "message 1, part 0", "message 1, part 2", "message 3, part 1"
    ]  # fmt: skip
    assert messages[1]["content"] == [{"type": "image"}, text, {"type": "image"}]
    assert (messages[0], messages[2]) == (chat[0], chat[2])
    assert chat[1]["content"][0]["image"] is a  # the caller's own is as it was


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that promises so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def moving() -> bytes:
    return stored(image(), "GIF", save_all=True, append_images=[image((1, 2, 3))])


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("broken", {"image": stored(image())[:50]}, "the image is broken"),
    ("cut jpeg", {"image": stored(image(size=(99, 99)), "JPEG")[:-200]}, "the image is broken"),
    ("no image", {"image": b"hello"}, "are no image that is read here; give one of BMP, GIF"),
    ("empty", {"image": b""}, "are no image that is read here"),
    ("tiff", {"image": stored(image(), "TIFF")}, "are no image that is read here"),
    ("eps", {"image": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n"}, "are no image"),
    ("bomb", {"image": bomb(9000, 9000)}, "an image of 9000 × 9000 pixels, and 40000000 are the"),
    ("large bomb", {"image": bomb(60_000, 60_000)}, "an image of more than 40000000 pixels"),
    ("moving", {"image": moving()}, "a moving image; give one of its frames"),
    ("number", {"image": 7}, "is a path, bytes, a data URL or an image of Pillow's, not 7"),
    ("absent", {"image": "no such.png"}, "there is no file 'no such.png'"),
    ("folder", {"image": "/"}, "there is no file '/'"),
    ("null byte", {"image": "a\0b"}, "there is no file|cannot be read"),
    ("web", {"image": "https://example.org/a.png"}, "nothing is fetched from 'https://example.org"),
    ("web url", {"url": "http://example.org/a.png"}, "nothing is fetched from 'http://example.org"),
    ("file url", {"url": "file:///etc/hostname"}, "is neither a data URL nor a web address"),
    ("path as url", {"url": "/etc/hostname"}, "is neither a data URL nor a web address"),
    ("nothing", {}, "an image is given by 'image' or 'path' or 'url', by one of them"),
    ("two", {"image": b"", "path": "a"}, "an image is given by 'image' or 'path' or 'url'"),
    ("more", {"image": b"", "size": 3}, "nothing here reads 'size'; drop it"),
    ("no base64", {"url": "data:image/png,abc"}, "a data URL of an image is like 'data:image/png"),
    ("a text", {"image": "data:text/plain;base64,aGk="}, "a data URL of an image is like 'data:im"),
    ("flat", {"image": Image.new("RGB", (0, 5))}, "an image of 0 × 5 pixels shows nothing"),
    ("huge bomb", {"image": bomb(10_000, 10_000)}, "an image of more than 40000000 pixels"),
    ("odd base64", {"url": "data:image/png;base64,a*b"}, "the data URL is no base64"),
]


@pytest.mark.parametrize(("name", "part", "why"), WRONG, ids=[name for name, _, _ in WRONG])
def test_what_is_wrong_is_named_with_its_place(name: str, part: dict[str, Any], why: str) -> None:
    with pytest.raises(PromptError, match=f"^message 0, part 0: .*({why})"):
        read({"type": "image", **part})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"url": url(b"x"), "detail": "high"}, "detail='high': the model's processor alone says"),
        ({"url": url(b"x"), "other": 1}, "nothing here reads 'other'; drop it"),
        ({}, "a URL is a string, not None"),
        (7, "a URL is a string, not 7"),
        ("/etc/hostname", "is neither a data URL nor a web address"),
    ],
)
def test_an_address_that_is_none_is_named(value: Any, why: str) -> None:
    with pytest.raises(PromptError, match=re.escape(why)):
        read({"type": "image_url", "image_url": value})


def test_sizes_have_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = stored(image(size=(99, 99)))
    (path := tmp_path / "a.png").write_bytes(data)
    monkeypatch.setattr(image_parts, "MOST_BYTES", len(data) - 3)
    for given in (data, path, url(data)):
        with pytest.raises(PromptError, match=f"{image_parts.MOST_BYTES} are the most; make it"):
            read({"type": "image", "image": given})
    monkeypatch.setattr(image_parts, "MOST_PIXELS", 99 * 99 - 1)
    with pytest.raises(PromptError, match="an image of 99 × 99 pixels, and 9800 are the most"):
        read({"type": "image", "image": image(size=(99, 99))})
    monkeypatch.setattr(image_parts, "MOST_IMAGES", 2)
    with pytest.raises(PromptError, match="the chat has 3 images, and 2 are the most"):
        taken_out(parts(*[{"type": "image", "image": b""}] * 3))


def test_the_images_of_a_chat_have_a_limit_together() -> None:
    one = image(size=(10, 10))
    assert opened("here", one, 100)
    with pytest.raises(PromptError, match="an image of 10 × 10 pixels, and those of a chat may"):
        opened("here", one, 99)


class Processor:
    """Counts how many images it was given."""

    image_token = "<image>"
    count = 0

    def __call__(self, **given: Any) -> dict[str, Any]:
        self.count += 1
        offsets = [[{"replacement": given["text"][0] * 3}]]
        return {"text_replacement_offsets": offsets, "pixel_values": given["images"]}


def test_an_image_that_somebody_has_is_not_processed_again() -> None:
    """And is nobody's afterwards."""
    reader = ImageReader(processor := Processor())
    with ThreadPoolExecutor(8) as pool:
        seven = [opened("here", image((n % 7, 0, 0))) for n in range(56)]
        found = list(pool.map(lambda one: reader.read("here", one), seven))
    assert processor.count == len(set(found)) == 7
    assert [one.digest for one in found] == [one.digest for one in seven]
    del found
    gc.collect()
    reader.read("here", seven[0])
    assert processor.count == 8


def test_an_image_is_read_while_a_model_is_loaded() -> None:
    """Which may take minutes, and for which other threads are kept from transformers' loggers."""
    reader = ImageReader(Processor())
    with LOADING, ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.read, "here", opened("here", image())).result(60)
    assert found.text == "<image>" * 3


def test_no_caller_can_write_the_salt_of_images() -> None:
    """Pages are shared by prompts of one salt and the same tokens."""
    one, other = ReadImage(b"a", "", {}), ReadImage(b"b", "", {})
    salt = PromptImages([one]).salt
    assert salt == PromptImages([one]).salt != PromptImages([other]).salt
    assert re.fullmatch("images [0-9a-f]{16} [0-9a-f]{32}", salt)
    code = "from jackfield.engine import prompt_images; print(prompt_images._OWN)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() != prompt_images._OWN


def test_a_bomb_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    with pytest.raises(PromptError, match="pixels"):
        read({"type": "image", "image": bomb(9000, 9000)})


def test_without_pillow_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(PromptError, match=r"images need Pillow: pip install 'jackfield\[vision\]'"):
        read({"type": "image", "image": b""})
