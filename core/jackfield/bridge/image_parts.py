"""An image of a chat message, from what a caller calls it: opened within limits, and named."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.bridge.image_hosts import ImageHosts, is_web
from jackfield.errors import PromptError, first_line, quoted
from jackfield.requests.prompts import BYTES

if TYPE_CHECKING:
    from PIL import Image

#: What is opened, of all that Pillow reads: the usual ones, whose readers are those most looked at.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
MOST_BYTES = 32 * 2**20  # of a file
MOST_PIXELS = 40_000_000  # three bytes each when they are decoded, and floats in a processor
MOST_IMAGES = 256  # of a chat
MOST_OF_A_CHAT = 4 * MOST_PIXELS  # pixels of its images together

#: type of a part -> the keys that may say what its image is
_KEYS = {"image": ("image", "path", "url"), "image_url": ("image_url",)}
#: The head of a data URL, whose words are in any case.
_HEAD = re.compile(r"data:(image/[^;,]+)?(;[^;,]+)*;base64", re.IGNORECASE)
_INSTALL = "images need Pillow: pip install 'jackfield[vision]'"


@dataclass(frozen=True, eq=False)
class Picture:
    """An image in RGB, and a name that equal images have: a hash of its pixels."""

    image: Image.Image
    digest: bytes


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in _KEYS


def has_images(prompt: Any) -> bool:
    """Whether a prompt is a chat with an image in it."""
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], Mapping):
        return False
    contents = [m.get("content") for m in prompt if isinstance(m, Mapping)]
    return any(
        isinstance(content, list | tuple) and any(map(is_image, content)) for content in contents
    )


def taken_out(messages: Sequence[Any]) -> tuple[list[Any], list[tuple[str, Any]]]:
    """The messages with `{"type": "image"}` for each image, and what each was, with its place.

    Raises PromptError for a part that says nothing of its image, or too much, and for too many.
    """
    found: list[tuple[str, Any]] = []
    chat = []
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(is_image, content)):
            chat.append(message)
            continue
        wheres = [f"message {at}, part {n}" for n in range(len(content))]
        pairs = list(zip(wheres, content, strict=True))
        found += [(where, _source(where, part)) for where, part in pairs if is_image(part)]
        parts = [{"type": "image"} if is_image(part) else part for part in content]
        chat.append({**message, "content": parts})
    if len(found) > MOST_IMAGES:
        raise PromptError(f"the chat has {len(found)} images, and {MOST_IMAGES} are the most")
    return chat, found


def _source(where: str, part: Mapping[str, Any]) -> Any:
    """What a part says that its image is."""
    kind = part["type"]
    given = [key for key in _KEYS[kind] if part.get(key) is not None]
    if others := sorted(str(key) for key in part if key != "type" and key not in _KEYS[kind]):
        raise PromptError(f"{where}: nothing here reads {', '.join(map(quoted, others))}; drop it")
    if len(given) != 1:
        wanted = " or ".join(map(repr, _KEYS[kind]))
        raise PromptError(f"{where}: an image is given by {wanted}, by one of them")
    value = part[given[0]]
    if kind == "image_url":
        value = _address(where, value)
    if given[0] in ("url", "image_url"):
        if not isinstance(value, str):
            raise PromptError(f"{where}: a URL is a string, not {quoted(value)}")
        if not (_is_data(value) or is_web(value)):
            raise PromptError(
                f"{where}: {quoted(value)} is neither a data URL nor a web address; write "
                "'data:image/png;base64,…', or give the image itself"
            )
    return value


def _address(where: str, value: Any) -> Any:
    """The URL of an `image_url`, which may be an object that has it."""
    if not isinstance(value, Mapping):
        return value
    if value.get("detail", "auto") != "auto":
        raise PromptError(
            f"{where}: detail={quoted(value['detail'])}: the model's processor alone says how "
            "large an image becomes; drop it"
        )
    if others := sorted(map(str, value.keys() - {"url", "detail"})):
        raise PromptError(f"{where}: nothing here reads {', '.join(map(quoted, others))}; drop it")
    return value.get("url")


def opened(
    where: str, value: Any, left: int = MOST_OF_A_CHAT, hosts: ImageHosts | None = None
) -> Picture:
    """The image that `value` is: a path, bytes, a data URL, an image of Pillow's, or an address at
    one of `hosts`.

    As transformers' `load_image` has it: turned as its camera was held, and in RGB. Raises
    PromptError for one that is broken, empty, larger than `MOST_BYTES`, `MOST_PIXELS` or the
    pixels that are `left` to its chat (before it is decoded), of another kind than `FORMATS`, or
    moving.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise PromptError(f"{where}: {_INSTALL}") from None
    image = value if isinstance(value, Image.Image) else _image(where, _bytes(where, value, hosts))
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise PromptError(
            f"{where}: an image of {width} × {height} pixels, and {MOST_PIXELS} are the most; make "
            "it smaller"
        )
    if width * height > left:
        raise PromptError(
            f"{where}: an image of {width} × {height} pixels, and those of a chat may have "
            f"{MOST_OF_A_CHAT} together; make them smaller, or ask for some at a time"
        )
    if not width * height:
        raise PromptError(f"{where}: an image of {width} × {height} pixels shows nothing")
    try:
        # The further pictures of a camera's JPEG (MPO) are the same in other sizes.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise PromptError(f"{where}: a moving image; give one of its frames")
        upright: Any = ImageOps.exif_transpose(image)
        rgb: Image.Image = upright.convert("RGB")
    except PromptError:
        raise
    except Exception as error:
        raise PromptError(f"{where}: {_broken(error)}") from error
    named = blake2b(f"{rgb.size}".encode(), digest_size=16)
    named.update(rgb.tobytes())
    return Picture(rgb, named.digest())


def _image(where: str, data: bytes) -> Image.Image:
    """The image in a file's bytes, of which the head was read."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise PromptError(
            f"{where}: these bytes are no image that is read here; give one of {', '.join(FORMATS)}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PromptError(
            f"{where}: an image of more than {MOST_PIXELS} pixels; make it smaller"
        ) from None
    except Exception as error:
        raise PromptError(f"{where}: {_broken(error)}") from error


def _is_data(text: str) -> bool:
    return text[:5].lower() == "data:"


def _broken(error: Exception) -> str:
    return f"the image is broken: {first_line(error)[:200]}"


def _bytes(where: str, value: Any, hosts: ImageHosts | None) -> bytes:
    """The bytes of an image's file. Raises PromptError."""
    if isinstance(value, str) and _is_data(value):
        return _decoded(where, value)
    if isinstance(value, BYTES):
        data = bytes(value)
        _check_size(where, len(data))
        return data
    if not isinstance(value, str | os.PathLike):
        raise PromptError(
            f"{where}: an image is a path, bytes, a data URL or an image of Pillow's, not "
            f"{quoted(value)}"
        )
    if isinstance(value, str) and "://" in value:
        if hosts is not None and is_web(value):
            return hosts.fetch(where, value, MOST_BYTES)
        raise PromptError(
            f"{where}: nothing is fetched from {quoted(value)}; give the image itself, or load "
            "with the host in image_hosts"
        )
    path = Path(value)
    try:
        if not path.is_file():
            raise PromptError(f"{where}: there is no file {quoted(str(path))}")
        _check_size(where, path.stat().st_size)
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise PromptError(
            f"{where}: {quoted(str(path))} cannot be read: {first_line(error)}"
        ) from None


def _decoded(where: str, url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not _HEAD.fullmatch(head):
        raise PromptError(f"{where}: a data URL of an image is like 'data:image/png;base64,…'")
    _check_size(where, len(body) * 3 // 4)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{where}: the data URL is no base64: {first_line(error)}") from None


def _check_size(where: str, count: int) -> None:
    if count > MOST_BYTES:
        raise PromptError(
            f"{where}: an image of {count} bytes, and {MOST_BYTES} are the most; make it smaller"
        )
