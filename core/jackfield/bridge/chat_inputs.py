"""What a chat template is told beside messages reaches the text; whatever would not is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.bridge.chat_templates import ChatTemplate
from jackfield.errors import PromptError, quoted

_Chat = Sequence[Mapping[str, Any]]


def check_variables(chat: _Chat, template: ChatTemplate) -> None:
    """Raise PromptError for a variable that makes no difference, whatever its value."""
    for name in template.asked.chat_template_kwargs or {}:
        if not template.reads_variable(name, chat):
            raise PromptError(
                f"chat_template_kwargs: the chat template reads no {quoted(name)}; drop it"
            )


def check_what_is_told(chat: _Chat, found: str, template: ChatTemplate) -> None:
    """Raise PromptError for a tool or a document that the text `found` is the same without."""
    for name in ("tools", "documents"):
        items = getattr(template.asked, name) or []
        for n in _unseen(chat, name, items, template) if items else ():
            rest = [*items[:n], *items[n + 1 :]]
            try:
                same = template.told(**{name: rest or None}).render(chat) == found
            except PromptError:  # so it is read
                continue
            if same:
                raise PromptError(
                    f"{name}[{n}]: the chat template does not read it in this chat; drop {name}, "
                    "or write them into a message"
                )


def _unseen(
    chat: _Chat, name: str, items: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> Sequence[int]:
    """The items whose own names or texts are not in the text; one rendering clears most."""
    probes = [f"Zi{n}iZ" for n in range(len(items))]
    like = _renamed if name == "tools" else filled
    probed = [like(item, probe) for item, probe in zip(items, probes, strict=True)]
    try:
        seen = template.told(**{name: probed}).render(chat)
    except PromptError:
        return range(len(items))
    return [n for n, probe in enumerate(probes) if probe not in seen]


def _renamed(tool: Mapping[str, Any], probe: str) -> Mapping[str, Any]:
    """The tool under another name; templates go by other strings in it."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": {**function, "name": probe}}
    return {**tool, "name": probe}


def filled(value: Any, probe: str) -> Any:
    """The same with `probe` for every string."""
    if isinstance(value, list):
        return [filled(item, probe) for item in value]
    if isinstance(value, dict):
        return {key: filled(item, probe) for key, item in value.items()}
    return probe if isinstance(value, str) else value
