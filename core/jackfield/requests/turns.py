"""How a chat ends for the model that reads it: a new turn of the assistant, or the last goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.errors import PromptError, SettingsError, quoted

#: Settings of a prompt, with the names that they have in `apply_chat_template`.
OF_A_CHAT = ("continue_final_message", "add_generation_prompt")


@dataclass(frozen=True)
class Turn:
    """What is asked for: the last message goes on, a turn begins after it; None: nothing said."""

    continues: bool | None = None
    begins: bool | None = None

    def of(self, messages: Sequence[Any]) -> Turn:
        """The same with nothing left open. Raises PromptError where it may mean two things."""
        if self.continues is None and self.begins is None and _is_assistants(messages[-1]):
            raise PromptError(
                "the last message is the assistant's: continue_final_message=True continues it, as "
                "transformers' pipelines do, add_generation_prompt=True ends it and begins another"
            )
        continues = bool(self.continues)
        return Turn(continues, not continues if self.begins is None else self.begins)

    def refuse_without_chat(self) -> None:
        """Raise PromptError where something is asked for that only a chat has."""
        for name, value in zip(OF_A_CHAT, (self.continues, self.begins), strict=True):
            if value:
                raise PromptError(
                    f"{name}=True is about chat messages, and this prompt is none; drop it"
                )


UNSAID = Turn()


def _is_assistants(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def taken(asked: Mapping[str, Any]) -> tuple[Turn, dict[str, Any]]:
    """The turn that a request asks for, and its other settings. Raises SettingsError."""
    said = {name: asked.get(name) for name in OF_A_CHAT}
    for name, value in said.items():
        if value is not None and not isinstance(value, bool):
            raise SettingsError(f"{name} must be True or False, not {quoted(value)}")
    continues, begins = said.values()
    if continues and begins:
        raise SettingsError(
            "continue_final_message=True and add_generation_prompt=True contradict each other: "
            "the last message goes on, or a new one begins; give one of them"
        )
    return Turn(continues, begins), {k: v for k, v in asked.items() if k not in OF_A_CHAT}
