"""From chat messages to the text that a model reads; whatever would be dropped is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.bridge.chat_inputs import check_variables, check_what_is_told, filled
from jackfield.bridge.chat_templates import THOUGHTS, ChatTemplate
from jackfield.errors import PromptError, first_line, quoted

_Message = dict[str, Any]

#: Who says what came of a call.
_RESULTS = ("tool", "function", "ipython")
#: What to do about a key that is not read, where dropping it would say something else.
_INSTEAD = {"tool_call_id": "give the results in the order of their calls"}


def text_of(messages: Sequence[Any], template: ChatTemplate) -> str:
    """The text of a chat. Raises PromptError, also where the template would leave out a part."""
    chat = thoughts_as_read(plain(messages), template)
    if template.continues and chat[-1]["content"] is None:
        raise PromptError("the last message has no 'content' that could be continued; give it some")
    check_variables(chat, template)
    chat = _without_content(chat, template)
    try:
        found, lost = _tried(chat, template)
    except PromptError:
        if (parted := _parted(chat, template)) is None:
            raise
        return parted
    if lost is None:
        check_keys(chat, found, template)
        check_what_is_told(chat, found, template)
        return found
    if (parted := _parted(chat, template)) is None:
        raise PromptError(
            f"message {lost} (role {quoted(chat[lost]['role'])}): the chat template leaves out its "
            "text; drop the message, or give plain text"
        )
    return parted


def plain(messages: Sequence[Any]) -> list[_Message]:
    """The messages as plain JSON, the text of each one string, or None. Raises PromptError."""
    return [plain_message(at, message) for at, message in enumerate(messages)]


def _parted(chat: list[_Message], template: ChatTemplate) -> str | None:
    """The text by a template that reads lists of parts and no strings; None: it does not."""
    whole = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if m["content"] else m
        for m in chat
    ]
    try:
        found, lost = _tried(whole, template)
    except PromptError:
        return None
    if lost is not None:
        return None
    check_keys(whole, found, template)
    check_what_is_told(whole, found, template)
    return found


def plain_message(at: int, message: Any) -> _Message:
    """A message as plain JSON, its `content` a string or None."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(
            f"a chat message needs 'role' and 'content', got {quoted(message)} as message {at}"
        )
    if isinstance(parts := message.get("content"), list | tuple):
        for n, part in enumerate(parts):
            _check_type(at, n, part)  # before JSON, which images of Pillow's are not
    try:
        plain: _Message = json.loads(json.dumps(dict(message)))
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(
            f"message {at} of the chat is not JSON: {first_line(error)[:300]}"
        ) from None
    content = plain.get("content")
    if isinstance(content, list):
        content = "".join(text_of_part(at, n, part) for n, part in enumerate(content))
    elif content is None and not _may_be_silent(plain):
        raise PromptError(
            f"a chat message needs 'role' and 'content', got {quoted(message)} as message {at}"
        )
    elif not (content is None or isinstance(content, str)):
        raise PromptError(
            f"message {at}: 'content' must be a string or a list of parts, not {quoted(content)}"
        )
    return {**plain, "content": content}


def _may_be_silent(message: _Message) -> bool:
    """Whether a message may have no content: a call, what came of it, or a thought."""
    role = message["role"]
    if role in _RESULTS:
        return True
    said = ("tool_calls", "function_call", *THOUGHTS)
    return role == "assistant" and any(message.get(key) for key in said)


def thoughts_as_read(chat: list[_Message], template: ChatTemplate) -> list[_Message]:
    """The same, with each thought under a name that the template reads, whichever it came by.

    Where a message has two that differ, the one that is not read is left for `check_keys`.
    """
    if not any(message.get(key) for message in chat for key in THOUGHTS):
        return chat
    if (own := template.thought_key) is None:
        return chat
    others = [key for key in THOUGHTS if not template.reads(key)]
    found = [dict(message) for message in chat]
    for message in found:
        for key in others:
            if (thought := message.get(key)) and message.get(own) in (None, "", thought):
                message[own] = message.pop(key)
    return found


def _check_type(at: int, n: int, part: Any) -> None:
    """Raise PromptError for a part of a message that is no text."""
    where = f"message {at}, part {n}"
    if not isinstance(part, Mapping) or "type" not in part:
        raise PromptError(
            f"{where}: a part is like {{'type': 'text', 'text': …}}, not {quoted(part)}"
        )
    if part["type"] != "text":
        raise PromptError(
            f"{where}: nothing here reads a part of type {quoted(part['type'])}; drop it"
        )


def text_of_part(at: int, n: int, part: Any) -> str:
    """The text of a part of a message. Raises PromptError for what is none."""
    _check_type(at, n, part)
    where = f"message {at}, part {n}"
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{where}: 'text' must be a string, not {quoted(text)}")
    if others := sorted(part.keys() - {"type", "text"}):
        raise PromptError(f"{where}: nothing here reads {', '.join(map(quoted, others))}; drop it")
    return text


def _without_content(chat: list[_Message], template: ChatTemplate) -> list[_Message]:
    """The same, where no template writes "None" for a message without content.

    Some branch on None and others join it to texts, so it is None where that makes a difference
    that the word "None" does not make.
    """
    if all(message["content"] is not None for message in chat):
        return chat

    def instead(text: str) -> list[_Message]:
        return [{**m, "content": text} if m["content"] is None else m for m in chat]

    try:
        found = template.render(chat)
    except PromptError:
        return instead("")
    return instead("") if found == template.render(instead("None")) else chat


def _tried(chat: list[_Message], template: ChatTemplate) -> tuple[str, int | None]:
    """The text of a chat, and the first message whose own text is not in it; None: all are.

    Found out with other texts in their places, so that it is the template that is looked at: it may
    do with a text what it wants, but not without it.
    """
    found = template.render(chat)
    texts = {at: _of(m["content"]) for at, m in enumerate(chat) if _of(m["content"]).strip()}
    probes = {at: f"Zq{at}qZ" for at in texts}
    probed = [{**m, "content": _like(m["content"], probes.get(at))} for at, m in enumerate(chat)]
    try:
        seen = template.render(probed)
    except PromptError:  # it looks into texts; then they are looked for themselves
        seen, probes = found, {at: text.strip() for at, text in texts.items()}
    return found, next((at for at, probe in probes.items() if probe not in seen), None)


def _of(content: Any) -> str:
    return content[0]["text"] if isinstance(content, list) else content or ""


def _like(content: Any, probe: str | None) -> Any:
    """The probe in the form of `content`."""
    if probe is None:
        return content
    return [{"type": "text", "text": probe}] if isinstance(content, list) else probe


def check_keys(chat: list[_Message], found: str, template: ChatTemplate) -> None:
    """Raise PromptError where a message has a key that makes no difference."""
    own = [(at, key) for at in range(len(chat)) for key in _more(chat, at, template)]
    for at, key in _unseen(chat, own, template) if own else ():
        without = {k: v for k, v in chat[at].items() if k != key}
        try:
            dropped = template.render([*chat[:at], without, *chat[at + 1 :]]) == found
        except PromptError:  # so it is read
            continue
        if dropped:
            raise PromptError(
                f"message {at} (role {quoted(chat[at]['role'])}): the chat template does not read "
                f"{quoted(key)}; {_INSTEAD.get(key, 'drop it')}"
            )


def _more(chat: list[_Message], at: int, template: ChatTemplate) -> list[str]:
    """The keys of a message that say something beside who says what."""
    return [
        key
        for key, value in chat[at].items()
        if key not in ("role", "content")
        and value not in (None, "", [], {}, False)
        and not (key in THOUGHTS and template.reads(key))  # thoughts that are over may be left out
        and not (key in ("name", "tool_call_id") and _told_by_order(chat, at, key))
    ]


def _told_by_order(chat: list[_Message], at: int, key: str) -> bool:
    """Whether `key` of a result only says what its place says: the n-th answers the n-th call."""
    if chat[at]["role"] not in _RESULTS:
        return False
    start, value = at, chat[at][key]
    while start and chat[start - 1]["role"] in _RESULTS:
        start -= 1
    calls = _calls(chat[start - 1]) if start else []
    if key == "tool_call_id":
        ids = [number for number, _ in calls]
        return value not in ids or ids[at - start : at - start + 1] == [value]
    return [name for _, name in calls[at - start : at - start + 1]] == [value]


def _calls(message: _Message) -> list[tuple[Any, Any]]:
    """The id and the function's name of each call in a message, as far as it has them."""
    calls = message.get("tool_calls") or [{"function": message.get("function_call")}]
    found = [call if isinstance(call, dict) else {} for call in calls]
    whole = [call.get("function") or call for call in found]
    return [
        (call.get("id"), function.get("name") if isinstance(function, dict) else None)
        for call, function in zip(found, whole, strict=True)
    ]


def _unseen(
    chat: list[_Message], own: list[tuple[int, str]], template: ChatTemplate
) -> list[tuple[int, str]]:
    """Those whose strings are not in the text; one rendering clears most of them."""
    probed = [dict(message) for message in chat]
    for n, (at, key) in enumerate(own):
        probed[at][key] = filled(chat[at][key], f"Zk{n}kZ")
    try:
        seen = template.render(probed)
    except PromptError:
        return own
    return [pair for n, pair in enumerate(own) if f"Zk{n}kZ" not in seen]
