"""The images of a prompt: what they are, and which of its tokens stand for them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from jackfield.bridge.image_chats import Places
from jackfield.bridge.image_parts import MOST_OF_A_CHAT, opened, taken_out
from jackfield.bridge.image_steps import Shown
from jackfield.errors import PromptError

if TYPE_CHECKING:
    from jackfield.bridge.image_reader import ImageReader, ReadImage

_OWN = f"images {secrets.token_hex(8)}"  # so that no caller's salt is that of images


@dataclass(eq=False)
class PromptImages:
    """The images of a request's prompt, which its samples share; `shown` says where they stand."""

    images: Seq[ReadImage]
    shown: Shown = field(default_factory=lambda: Shown(()))

    @property
    def salt(self) -> str:
        """What parts the pages of prompts with other images: their tokens may be the same."""
        named = blake2b(b"".join(image.digest for image in self.images), digest_size=16)
        return f"{_OWN} {named.hexdigest()}"


class ImageIntake:
    """From the images in a chat to what its tokens stand for; `reader` is a reason where none is
    read.
    """

    def __init__(self, reader: ImageReader | str, token: int) -> None:
        self._reader, self._token = reader, token

    def taken(self, prompt: Any) -> tuple[Any, PromptImages | None]:
        """A prompt without its images, and these. Raises PromptError."""
        chat = isinstance(prompt, list | tuple) and len(prompt) > 0
        if not chat or not isinstance(prompt[0], Mapping):
            return prompt, None
        messages, found = taken_out(prompt)
        if not found:
            return prompt, None
        if isinstance(self._reader, str):
            raise PromptError(f"{found[0][0]}: images are not read here: {self._reader}")
        if len(found) > 1 and self._reader.alone is not None:
            raise PromptError(
                f"{found[1][0]}: a chat may have one image here: {self._reader.alone}"
            )
        read, left = [], MOST_OF_A_CHAT
        for where, value in found:
            picture = opened(where, value, left)
            left -= math.prod(picture.image.size)
            read.append(self._reader.read(where, picture))
        return messages, PromptImages(read)

    def places(self, images: PromptImages) -> Places:
        """What stands for each in a text."""
        assert not isinstance(self._reader, str)
        return Places(self._reader.token, [image.text for image in images.images])

    def settle(self, images: PromptImages, ids: Seq[int]) -> None:
        """Say which tokens of their prompt stand for them."""
        images.shown = Shown([at for at, token in enumerate(ids) if token == self._token])
