"""From chat messages with images to the text that a model reads, each image in its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.bridge.chat_inputs import check_variables, check_what_is_told
from jackfield.bridge.chats import check_keys, plain_message, text_of_part, thoughts_as_read
from jackfield.errors import PromptError, quoted

if TYPE_CHECKING:
    from jackfield.bridge.chat_templates import ChatTemplate

_Message = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """What stands for images in a text: `token` once for each in what a chat template makes, and
    `instead` of it, in order, what the model reads, which has `num_tokens` of images.
    """

    token: str
    instead: Sequence[str]
    num_tokens: int = 0

    def filled(self, text: str, mark: str | None = None) -> str:
        """`text` with every place filled; a token behind `mark` is text. Raises PromptError."""
        token = re.escape(self.token)
        if mark is not None:
            token = f"(?<!{mark})(?<!\\\\u{ord(mark):04x}){token}"
        if (count := len(re.findall(token, text))) != len(self.instead):
            raise PromptError(
                f"the chat's text has {count} places for {len(self.instead)} images: a message "
                f"writes {quoted(self.token)} itself; drop it, or set sanitize_control_tokens=True"
            )
        pieces = iter(self.instead)
        return re.sub(token, lambda _: next(pieces), text)


def parted(messages: Sequence[Any]) -> list[_Message]:
    """The messages as plain JSON, whose lists of parts stay lists. Raises PromptError."""
    return [_parted(at, message) for at, message in enumerate(messages)]


def _parted(at: int, message: Any) -> _Message:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return plain_message(at, message)
    found = plain_message(at, {**message, "content": ""})
    image = {"type": "image"}
    parts = [
        image if part == image else {"type": "text", "text": text_of_part(at, n, part)}
        for n, part in enumerate(content)
    ]
    return {**found, "content": parts}


def text_with_images(messages: Sequence[Any], template: ChatTemplate, places: Places) -> str:
    """The text of a chat with images, a token for each. Raises PromptError.

    Also where the template leaves out a text, or has not as many places as there are images.
    """
    chat = thoughts_as_read(parted(messages), template)
    check_variables(chat, template)
    if template.continues and not _ends_in_text(chat[-1]):
        raise PromptError("the last message does not end in a text that could be continued")
    chat = [{**m, "content": ""} if m["content"] is None else m for m in chat]
    problem: PromptError | None = None
    for form in (chat, [_as_list(message) for message in chat]):
        try:
            _check_all_there(form, template, places)
            found = template.render(form)
        except PromptError as error:
            problem = problem or error
            continue
        check_keys(form, found, template)
        check_what_is_told(form, found, template)
        return found
    assert problem is not None
    raise problem


def _ends_in_text(message: _Message) -> bool:
    content = message["content"]
    return isinstance(content, str) or bool(content and content[-1]["type"] == "text")


def _as_list(message: _Message) -> _Message:
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _check_all_there(chat: list[_Message], template: ChatTemplate, places: Places) -> None:
    """Raise PromptError where a text or an image would be left out: found with other texts."""
    probes: dict[str, int] = {}

    def probe(at: int, text: str) -> str:
        if not text.strip():
            return text
        probes[word := f"Zq{len(probes)}qZ"] = at
        return word

    seen = template.render([_probed(at, message, probe) for at, message in enumerate(chat)])
    if lost := next((word for word in probes if word not in seen), None):
        at = probes[lost]
        raise PromptError(
            f"message {at} (role {quoted(chat[at]['role'])}): the chat template leaves out its "
            "text; drop the message, or give plain text"
        )
    if (count := seen.count(places.token)) != len(places.instead):
        raise PromptError(
            f"the chat template has places for {count} of the chat's {len(places.instead)} images; "
            "give images in messages of the role that may have them, or fewer"
        )


def _probed(at: int, message: _Message, probe: Callable[[int, str], str]) -> _Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": probe(at, content)}
    return {**message, "content": list(_probed_parts(at, content, probe))}


def _probed_parts(
    at: int, parts: Sequence[_Message], probe: Callable[[int, str], str]
) -> Iterator[_Message]:
    for part in parts:
        yield {**part, "text": probe(at, part["text"])} if part["type"] == "text" else part
