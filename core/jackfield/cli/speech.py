"""What is said in a conversation, on the screen and as it is remembered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jackfield.cli.output import console

if TYPE_CHECKING:
    from rich.console import Console

    from jackfield.parsing.said import ToolCallDelta


class Speech:
    """An answer as it is shown: thoughts dim on standard error, all else on standard output.

    `text` is what was shown of its text. A call is a line with its name and its arguments as JSON.
    """

    def __init__(self) -> None:
        self.text = ""
        self._thinking = False  # in the midst of a line of a thought
        self._midst = False  # in the midst of a line of standard output

    @cached_property
    def _beside(self) -> Console:
        return console(stderr=True)

    def show(self, thought: str, text: str, calls: Iterable[ToolCallDelta] = ()) -> None:
        """What comes next of each."""
        if thought:
            self._think(thought)
            self._thinking = not thought.endswith("\n")
        if text:
            self.text += text  # first, since Ctrl-C may come in between
            self._put(text)
        for call in calls:
            if call.name is not None:
                self._put(f"{self._end_of_line()}{call.name} ")
            self._put(call.text + ("\n" if call.ended else ""))

    def end(self) -> None:
        """End the last line of what was shown."""
        self._end_thought()
        if end := self._end_of_line():
            self._put(end)

    def _end_of_line(self) -> str:
        return "\n" if self._midst else ""

    def _end_thought(self) -> None:
        if self._thinking:
            self._think("\n")
            self._thinking = False

    def _think(self, text: str) -> None:
        with contextlib.suppress(OSError):  # who closed it wants no thoughts
            self._beside.print(text, style="dim", end="", soft_wrap=True)

    def _put(self, text: str) -> None:
        if not text:
            return
        self._end_thought()
        self._midst = not text.endswith("\n")
        print(text, end="", flush=True)


@dataclass
class Remembered:
    """The messages of a conversation, oldest first; `waiting` are calls whose results come next.

    Each call is (id, name).
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    begun: int = 0  # messages before the last one of the user's

    def told(self, text: str) -> bool:
        """Add what the user says: the result of a call that waits, or a message.

        Returns whether it is the model's turn.
        """
        if self.waiting:
            number, name = self.waiting.pop(0)
            self.messages.append(
                {"role": "tool", "tool_call_id": number, "name": name, "content": text}
            )
        else:
            self.begun = len(self.messages)
            self.messages.append({"role": "user", "content": text})
        return not self.waiting

    def said(self, message: dict[str, Any] | None) -> None:
        """Add the answer; None: there is none, and what it was to answer is forgotten."""
        if message is None:
            del self.messages[self.begun :]
            return
        self.messages.append(message)
        calls = message.get("tool_calls") or ()
        self.waiting = [(call["id"], call["function"]["name"]) for call in calls]

    def forget(self) -> None:
        self.messages.clear()
        self.waiting.clear()

    @property
    def asks(self) -> str:
        """What a terminal asks for."""
        return f"{self.waiting[0][1]}> " if self.waiting else "> "
