"""The format of one model: its form of calls and thoughts, and what follows from these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jackfield.errors import PromptError, quoted
from jackfield.parsing import confining, detecting, harmony
from jackfield.parsing.calling import Calling
from jackfield.parsing.detecting import Probed
from jackfield.parsing.frames import FRAMES, Frame
from jackfield.parsing.harmony import HarmonyParser
from jackfield.parsing.parser import FramedParser
from jackfield.parsing.tools import ToolChoice, chosen, read_tools

_HARMONY = "harmony"
#: The names of all forms of calls.
KNOWN = (*(frame.name for frame in FRAMES), _HARMONY)


@dataclass(frozen=True)
class Format:
    """How a model writes calls of tools and thoughts.

    Attributes:
        name: The name of its form of calls, one of `KNOWN`; None: it has none that is known.
        thought: The marks around a thought, where its chat template has them.
        special: The marks that are special tokens of its tokenizer, and their ids.
    """

    name: str | None
    thought: tuple[str, str] | None
    special: Mapping[str, int]
    _frame: Frame | None
    _as_text: bool
    _probed: Probed = field(repr=False, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether all that the model says is content, where it is told of no tools."""
        return self.thought is None and self.name != _HARMONY

    @property
    def reads_thoughts(self) -> bool:
        """Whether the model is told what it thought in turns before."""
        return self._probed.reads_thoughts

    def reads(self, variable: str, *, tools: bool = False) -> bool:
        """Whether the chat template reads a variable, in a chat with tools or in one without."""
        return self._probed.reads(variable, tools=tools)

    def starts_in_reasoning(
        self,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continued: str = "",
        *,
        after_tool: bool = False,
        confined: str | None = None,
    ) -> bool:
        """Whether what the model says begins inside of a thought.

        `continued`: the text of the assistant's message that goes on, instead of a new one.
        `after_tool`: the last message is the result of a call. `confined`: the regex or grammar
        that the text is held to, empty for JSON; it has no thought unless it can end one.
        """
        if self.thought is None:
            return False
        opens, closes = self.thought
        if confined is not None and closes not in confined:
            return False
        if continued:
            return continued.rfind(opens) > continued.rfind(closes)
        return detecting.is_opened(self._probed, opens, chat_template_kwargs, after_tool=after_tool)

    def parser(
        self,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        *,
        parallel: bool = True,
        starts_in_reasoning: bool = False,
    ) -> Calling:
        """A new parser of one answer: `push(text)`, `finish()` and `done`.

        Calls of functions that are not in `tools`, or that `tool_choice` leaves out, are content.
        Raises SettingsError.
        """
        callable_, _ = chosen(read_tools(tools), tool_choice)
        if self.name == _HARMONY:
            return HarmonyParser(callable_, parallel=parallel)
        return FramedParser(
            self._frame,
            self.thought,
            callable_,
            parallel=parallel,
            starts_in_reasoning=starts_in_reasoning,
        )

    def settings(
        self,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        *,
        parallel: bool = True,
        starts_in_reasoning: bool = False,
        answer: Mapping[str, Any] | None = None,
        model: str = "this model",
    ) -> dict[str, Any]:
        """What an engine must be asked for, so that the parser finds what is asked for here.

        `tools` for the chat template, which is told of none where none may be called;
        `skip_special_tokens`, where marks are special tokens; `grammar`, where a call is required,
        or a tool is `strict`, or a text without calls is JSON that the schema `answer` allows.
        Raises SettingsError, and PromptError where the form is not known.
        """
        read = read_tools(tools)
        callable_, required = chosen(read, tool_choice)
        found: dict[str, Any] = {}
        if self.special and (callable_ or self.name == _HARMONY or self._thinks_specially):
            found["skip_special_tokens"] = False
        if not callable_:
            return found
        if self.name is None:
            raise PromptError(
                f"the chat template of {model} writes tool calls in no form that is known here; "
                f"known are those of {', '.join(KNOWN)}; drop tools"
            )
        found["tools"] = list(tools or ())
        held = required or answer is not None or any(tool.strict for tool in callable_.values())
        if self._frame is None and held:
            found["grammar"] = confining.of_harmony(
                callable_, self.special, required=required, answer=answer
            )
        elif self._frame is not None and held:
            found["grammar"] = confining.of_frame(
                self._frame,
                self.thought,
                callable_,
                self.special,
                required=required,
                parallel=parallel,
                thinks=starts_in_reasoning,
                answer=answer,
            )
        return found

    @property
    def _thinks_specially(self) -> bool:
        return self.thought is not None and not self.special.keys().isdisjoint(self.thought)

    def messages(self, messages: Sequence[Any]) -> list[Any]:
        """The messages of a chat, with calls as the chat template reads them.

        OpenAI has their arguments as text; most templates take an object. No content is None, as
        some templates tell calls by that. Raises PromptError.
        """
        return [self._message(n, message) for n, message in enumerate(messages)]

    def _message(self, number: int, message: Any) -> Any:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(calls, list | tuple) or not calls:
            return message
        where = f"message {number}"
        own = {"content": message.get("content") or None}
        return {**message, **own, "tool_calls": [self._call(where, call) for call in calls]}

    def _call(self, where: str, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        given = function["arguments"]
        if isinstance(given, str) and not self._as_text:
            given = _object(where, given)
        elif self._as_text and not isinstance(given, str):
            given = json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": given}}


def _object(where: str, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PromptError(
            f"{where}: the arguments of a call are an object of JSON, not {quoted(text)}"
        )
    return found


def format_of(tokenizer: Any) -> Format:
    """How the model of `tokenizer` says things, by what its chat template makes of probes.

    Takes some renderings of the template: ask once for a model.
    """
    probed = Probed(tokenizer)
    frame, is_harmony, as_text = detecting.calls_of(probed)
    thought = None if is_harmony else detecting.thought_of(probed)
    marks = [*(harmony.MARKS if is_harmony else ()), *(frame.marks if frame else ()),
             *(thought or ())]  # fmt: skip
    return Format(
        name=_HARMONY if is_harmony else frame.name if frame else None,
        thought=thought,
        special=_special(tokenizer, [mark.strip() for mark in marks]),
        _frame=frame,
        _as_text=as_text,
        _probed=probed,
    )


def _special(tokenizer: Any, marks: Sequence[str]) -> dict[str, int]:
    """The special tokens that stand in marks."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found = {str(t): number for number, t in added.items() if getattr(t, "special", False)}
    return {t: n for t, n in found.items() if any(t in mark for mark in marks)}
