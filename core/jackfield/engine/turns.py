"""The assistant's turns in chats: their tokens are parsed when somebody reads the parts."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

from jackfield.bridge.tokenizer import Text
from jackfield.contracts import Settings, Structure
from jackfield.parsing.parts import Part, merged
from jackfield.parsing.said import Said, ToolCall, ToolCallDelta, piece, whole
from jackfield.parsing.tools import read_tools
from jackfield.requests.chat_settings import ChatSettings

if TYPE_CHECKING:
    from jackfield.parsing.calling import Calling
    from jackfield.parsing.formats import Format


class Turns:
    """How the model of an engine says things. Belongs to one engine and must not refer to it."""

    def __init__(self, text: Text) -> None:
        self.text = text

    @cached_property
    def form(self) -> Format:
        """The form of its calls and thoughts, which takes some renderings of its template."""
        from jackfield.parsing.formats import format_of  # jinja is read where there is a chat

        return format_of(self.text.tokenizer)

    def turn(
        self, prompt: Any, chat: ChatSettings, settings: Settings, ids: Sequence[int]
    ) -> Turn | None:
        """What follows `prompt`, whose tokens are `ids`; None where it is no chat.

        Raises SettingsError for tools that are no functions.
        """
        last = prompt[-1] if isinstance(prompt, Sequence) and len(prompt) else None
        if not isinstance(last, Mapping):
            return None
        read_tools(chat.tools)
        chat = chat.of(prompt)
        content = _text(last.get("content")) if chat.continue_final_message else ""
        return Turn(
            self,
            chat,
            settings,
            blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest(),
            continued=content,
            after_tool=last.get("role") == "tool",
        )


def _text(content: Any) -> str:
    """The text of a message's content, which was read before."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _confined(structure: Structure | None) -> str | None:
    if structure is None:
        return None
    return structure.source if structure.kind in ("regex", "grammar") else ""


@dataclass(frozen=True)
class Turn:
    """How the answers to one prompt are read.

    `name` is made of the prompt, so that ids of calls are the same whenever it is asked again.
    `continued` is the text of the assistant's message that goes on; `after_tool`: the last message
    is the result of a call.
    """

    turns: Turns
    chat: ChatSettings
    settings: Settings
    name: str
    continued: str
    after_tool: bool

    @cached_property
    def unread(self) -> str | None:
        """Why calls cannot be found in what is said."""
        if not self.chat.tools or self.turns.form.name is not None:
            return None
        from jackfield.parsing.formats import KNOWN

        return (
            "the chat template writes tool calls in no form that is known here, so none can be "
            f"found; known are those of {', '.join(KNOWN)}; the text has them as they are"
        )

    @cached_property
    def marks(self) -> Mapping[int, str]:
        """Special tokens that stand around thoughts and calls, which a text leaves out.

        What ends an answer is none of them: it is never text.
        """
        if not self.settings.skip_special_tokens:
            return {}
        special, ends = self.turns.form.special, self.settings.eos_token_ids
        return {token: mark for mark, token in special.items() if token not in ends}

    @cached_property
    def opened(self) -> bool:
        """Whether it begins inside of a thought."""
        chat = self.chat
        if chat.add_generation_prompt is False and not chat.continue_final_message:
            return False  # the model itself begins its turn
        return self.turns.form.starts_in_reasoning(
            chat.chat_template_kwargs,
            self.continued,
            after_tool=self.after_tool,
            confined=_confined(self.settings.structure),
        )

    def parser(self, sample: int) -> Calling:
        """What reads one of the answers."""
        found = self.turns.form.parser(self.chat.tools, starts_in_reasoning=self.opened)
        found.name = f"{self.name}/{sample}"
        return found

    def is_text(self, token: int) -> bool:
        """Whether a token may be text: an end that could be is none in a structure."""
        return self.settings.structure is None or token not in self.settings.eos_token_ids


class Spelled:
    """The text of tokens as they come, with the special tokens among them that are `marks`.

    All else is as in the text of the answer: where it ends before a stop string, this one does, and
    no special token but these is in it.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._detokenizer = turn.turns.text.detokenizer(turn.settings)
        self._at = 0  # so much of the text was shown
        self._coming: list[tuple[int, str]] = []  # marks, and before which place they stand

    def push(self, token: int) -> str:
        """The text that is certain now."""
        if mark := self._turn.marks.get(token):
            self._coming.append((self._detokenizer.reach, mark))
        text = self._detokenizer.push([token]) if self._turn.is_text(token) else ""
        return self._shown(text)

    def finish(self) -> str:
        """The rest, after the last token."""
        found = self._shown(self._detokenizer.finish())
        rest = [] if self._detokenizer.stopped else [mark for _, mark in self._coming]
        return "".join([found, *rest])

    def _shown(self, text: str) -> str:
        found, end = "", self._at + len(text)
        while self._coming and self._coming[0][0] <= end:
            place, mark = self._coming.pop(0)
            cut = max(place - self._at, 0)
            found, text = found + text[:cut] + mark, text[cut:]
            self._at += cut
        self._at = end
        return found + text


class Heard:
    """What an answer says as its tokens come; each reader of a piece reads what comes before it.

    `told` is for the one who makes the tokens, all else for readers, in any thread.
    """

    def __init__(self, turn: Turn, sample: int) -> None:
        self._turn, self._sample = turn, sample
        self._tokens: list[int] = []
        self._lock = threading.Lock()

    def told(self, tokens: Iterable[int]) -> int:
        """Add what a step made; returns how many tokens there are."""
        self._tokens.extend(tokens)
        return len(self._tokens)

    def whole(self, token_ids: Sequence[int], text: str) -> Said[ToolCall]:
        """What all of the answer's tokens say, of which `text` is what a reader is shown."""
        turn = self._turn
        parser = turn.parser(self._sample)
        if not turn.marks.keys().isdisjoint(token_ids):
            spelled = Spelled(turn)
            pieces = [spelled.push(token) for token in token_ids]
            text = "".join([*pieces, spelled.finish()])
        return whole([*parser.push(text), *parser.finish()], turn.unread)

    def message(self, said: Said[ToolCall]) -> dict[str, Any]:
        """The message of the assistant's that says so, as the chat template reads it."""
        form, found = self._turn.turns.form, {"role": "assistant", "content": said.content}
        if said.reasoning and form.reads_thoughts:
            found["reasoning_content"] = said.reasoning
        if calls := [call for call in said.calls if call.whole]:
            listed = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
            (found,) = form.messages([{**found, "tool_calls": listed}])
        return found

    @cached_property
    def _reading(self) -> tuple[Spelled, Calling]:
        return Spelled(self._turn), self._turn.parser(self._sample)

    @cached_property
    def _parts(self) -> list[list[Part]]:
        """Of each token that was read."""
        return []

    @cached_property
    def _last(self) -> list[Part]:
        """What is certain when no more comes."""
        spelled, parser = self._reading
        return [*parser.push(spelled.finish()), *parser.finish()]

    def piece(self, start: int, end: int, *, last: bool) -> Said[ToolCallDelta]:
        """What the tokens from `start` to `end` made certain; `last`: and that there are no more.

        O(tokens) for all pieces of an answer together, in any order.
        """
        with self._lock:
            spelled, parser = self._reading
            for token in self._tokens[len(self._parts) : end]:
                self._parts.append(parser.push(spelled.push(token)))
            found = chain(*self._parts[start:end], self._last if last else ())
            return piece(merged(found), self._turn.unread)


@dataclass(frozen=True)
class Copied:
    """The same of an answer that was copied, and leaves its engine behind."""

    said: Said[ToolCall]
    own_message: Mapping[str, Any]

    def whole(self, token_ids: Sequence[int], text: str) -> Said[ToolCall]:
        return self.said

    def message(self, said: Said[ToolCall]) -> dict[str, Any]:
        return dict(self.own_message)
