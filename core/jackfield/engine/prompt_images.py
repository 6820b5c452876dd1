"""The images of a prompt: what they are, and which of its tokens stand for them."""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from jackfield.bridge.image_chats import Places
from jackfield.bridge.image_parts import MOST_OF_A_CHAT, has_images, opened, taken_out
from jackfield.bridge.image_steps import Shown
from jackfield.errors import PromptError
from jackfield.requests.features import A_CHAT_WITH_IMAGES

if TYPE_CHECKING:
    from jackfield.bridge.image_encoder import Features
    from jackfield.bridge.image_reader import ImageReader, ReadImage

_OWN = f"images {secrets.token_hex(8)}"  # so that no caller's salt is that of images


@dataclass(eq=False)
class PromptImages:
    """The images of a request's prompt, which its samples share; `shown` says where they stand.

    `num_tokens` of the prompt stand for them. `said` is what the model says of the first of them,
    until it was asked of all.
    """

    images: Seq[ReadImage]
    num_tokens: int = 0
    shown: Shown = field(default_factory=lambda: Shown(()))
    said: list[Features] = field(default_factory=list)

    @property
    def unread(self) -> bool:
        """Whether the model is still to be asked of some."""
        return self.shown.features is None

    @property
    def salt(self) -> str:
        """What parts the pages of prompts with other images: their tokens may be the same.

        Also of those with the same images, where more of them stand side by side: where tokens see
        one another, what is kept of one depends on how far they go on.
        """
        named = blake2b(b"".join(image.digest for image in self.images), digest_size=16)
        named.update(array("q", [end - begin for begin, end in self.shown.blocks]).tobytes())
        return f"{_OWN} {named.hexdigest()}"


class ImageIntake:
    """From the images in a chat to what its tokens stand for; `reader` is a reason where none is
    read. `cuts` says why no step feeds so many tokens of one prompt, as it has to where those of an
    image see one another; None: some do.
    """

    def __init__(
        self, reader: ImageReader | str, token: int, cuts: Callable[[int], str | None]
    ) -> None:
        self._reader, self._token, self._cuts = reader, token, cuts

    def taken(
        self, prompt: Any, most: int | None, before_image: Callable[[], None]
    ) -> tuple[Any, PromptImages | None]:
        """A prompt without its images, and these, which have less than `most` tokens together.

        Raises PromptError, and what `before_image` raises, which is called before each is opened.
        """
        if not has_images(prompt):
            self._check_none_meant(prompt)
            return prompt, None
        messages, found = taken_out(prompt)
        if isinstance(self._reader, str):
            raise PromptError(f"{found[0][0]}: images are not read here: {self._reader}")
        if len(found) > 1 and self._reader.rules.alone is not None:
            raise PromptError(
                f"{found[1][0]}: a chat may have one image here: {self._reader.rules.alone}"
            )
        word = self._reader.processor.tokenizer.convert_ids_to_tokens(self._token)
        read, tokens, left = [], 0, MOST_OF_A_CHAT
        for number, (where, value) in enumerate(found, 1):
            before_image()
            picture = opened(where, value, left, self._reader.hosts)
            left -= math.prod(picture.image.size)
            read.append(self._reader.read(where, picture))
            tokens += read[-1].text.count(word)
            if most is not None and tokens >= most:
                raise PromptError(
                    f"{where}: the first {number} of the chat's {len(found)} images have {tokens} "
                    f"tokens, the model's context is {most}: give fewer images, or smaller ones"
                )
        return messages, PromptImages(read, tokens)

    def _check_none_meant(self, prompt: Any) -> None:
        """Raise PromptError for token ids that an image belongs to: there is none in ids."""
        if not isinstance(prompt, Seq) or isinstance(prompt, str) or self._token not in prompt:
            return
        if isinstance(self._reader, str):
            raise PromptError(
                f"token {self._token} of the prompt stands for an image, and images are not read "
                f"here: {self._reader}"
            )
        raise PromptError(
            f"token {self._token} of the prompt stands for an image, and images are given in a "
            f"chat: {A_CHAT_WITH_IMAGES}"
        )

    def places(self, images: PromptImages) -> Places:
        """What stands for each in a text."""
        assert not isinstance(self._reader, str)
        return Places(
            self._reader.token, [image.text for image in images.images], images.num_tokens
        )

    def settle(self, images: PromptImages, ids: Seq[int]) -> None:
        """Say which tokens of their prompt stand for them.

        Raises PromptError for others, and for an image that no step can feed whole.
        """
        places = [at for at, token in enumerate(ids) if token == self._token]
        if len(places) != images.num_tokens:
            raise PromptError(
                f"the prompt has {len(places)} tokens of images, and its images have "
                f"{images.num_tokens}: a message writes such a token itself; drop it, or set "
                "sanitize_control_tokens=True"
            )
        images.shown = Shown(places)
        longest = max(end - begin for begin, end in images.shown.blocks)
        if self._fed_whole and (why := self._cuts(longest)):
            raise PromptError(
                f"{longest} tokens of an image see one another and are fed in one step, and {why}"
            )

    def check_guided(self, images: PromptImages, length: int) -> None:
        """Raise PromptError where the last of so many tokens cannot be fed beside another prompt's.

        A pair feeds its last tokens in one step, each behind all the others of its prompt.
        """
        if self._fed_whole and images.shown.places[-1] == length - 1:
            raise PromptError(
                "the prompt ends within an image, whose tokens are fed together, and with "
                "guidance_scale the last token of a prompt is fed alone; add a text behind it"
            )

    @property
    def _fed_whole(self) -> bool:
        return not isinstance(self._reader, str) and bool(self._reader.rules.blocks_in)
