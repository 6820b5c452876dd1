"""A tokenizer's chat template, rendered within bounds of time and memory.

A template is a program of whoever wrote the model's files: jinja's sandbox keeps it from the host's
objects, but not from looping for ever or from making gigabytes. So every operation whose result can
be much larger than what goes into it is asked for its price before it is done, and every line that
the template runs looks at the clock. No process of its own is needed, and no lock.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from jackfield.bridge import template_sandbox, template_source
from jackfield.bridge.template_sandbox import MOST, TIMES, Exceeded, size_of
from jackfield.errors import PromptError
from jackfield.requests.chat_settings import UNSAID, ChatSettings

#: What chats call the thought of a message, the most usual name first.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
SECONDS = 5.0  # of its thread's own time for one chat; an ordinary one takes a millisecond

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # of transformers: templates strip the space, or do not
_PROBE = "Zr0rZ"
_TEMPLATE = "<template>"  # what jinja calls the file of a template that comes as a string
_JINJA = (str(Path(jinja2.__file__).parent), template_sandbox.__file__)


@contextlib.contextmanager
def _until(end: float, file: str) -> Iterator[None]:
    """Every line of `file` or a template, and every function of theirs, looks at the clock.

    Functions of jinja and of `file`'s folder look when they are called; they themselves end, for
    what they are handed was measured. All others are left alone: one may be a callback of the
    garbage collector's, where what is raised is lost, and the clock with it.
    """
    of_it = file if file == _TEMPLATE else str(Path(file).parent)

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name.startswith((_TEMPLATE, of_it, *_JINJA)) and time.thread_time() > end:
            raise Exceeded(f"does not end within {SECONDS:g} s of computing")
        return look if name in (file, _TEMPLATE) else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with a mark at the end of the last one's text."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": content + _MARK}]
    *parts, end = content
    return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + _MARK}]}]


def _open_ended(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text up to the mark, and what transformers says where there is none."""
    content = messages[-1]["content"]
    last = content if isinstance(content, str) else content[-1]["text"]
    found, mark, rest = text.rpartition(_MARK.strip())
    if not mark or last.strip() not in text:
        raise ValueError("the last message is not in the text as it is, so it cannot be continued")
    return found if rest.startswith(" ") else found.rstrip()  # where texts are stripped


class ChatTemplate:
    """The template of a tokenizer, for one chat: all of its renderings share one time limit.

    As `asked`, a turn of the assistant's begins after the last message, or that one goes on
    (`continues`): the text ends where the message does, as `continue_final_message` of transformers
    has it. The template is told of `tools` and `documents`, and has the variables of
    `chat_template_kwargs`.
    `reads(key)`: whether the template looks for a key of messages at all. A tokenizer of a kind of
    its own, which renders by itself, is called instead, within the same time; what it makes is
    weighed when it is done.
    """

    def __init__(self, tokenizer: Any, asked: ChatSettings = UNSAID) -> None:
        self.asked = asked
        self.continues = bool(asked.continue_final_message)
        self._begins = asked.add_generation_prompt is not False and not self.continues
        self._tokenizer = tokenizer
        self._end = time.thread_time() + SECONDS
        own = getattr(type(tokenizer), "apply_chat_template", None)
        self._by_template = own is PreTrainedTokenizerBase.apply_chat_template
        named = tokenizer.get_chat_template(tools=asked.tools) if self._by_template else ""
        self._source = str(named)
        self._file = getattr(getattr(own, "__code__", None), "co_filename", _TEMPLATE)

    def told(self, **otherwise: Any) -> ChatTemplate:
        """The same template within the same time, with some of what was asked for changed."""
        other = copy.copy(self)
        other.asked = replace(self.asked, **otherwise)
        return other

    def reads(self, key: str) -> bool:
        if self._by_template:
            return self._names(template_source.keys, key)
        said = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", key: _PROBE},
        ]
        try:
            with _until(self._end, self._file):
                return _PROBE in self._asked(said, begins=False, continues=False)
        except (Exception, Exceeded):  # noqa: BLE001 - as it will do with the chat
            return False

    @property
    def thought_key(self) -> str | None:
        """What it calls the thought of a message; None: it reads none."""
        return next((key for key in THOUGHTS if self.reads(key)), None)

    @property
    def literals(self) -> str:
        """The texts that it may write; none are known of a tokenizer of a kind of its own."""
        try:
            with _until(self._end, self._file):
                return template_source.literals(self._source)
        except (Exception, Exceeded):  # noqa: BLE001 - the rendering says what is wrong
            return ""

    def _names(self, found: Callable[[str], frozenset[str]], name: str) -> bool:
        try:
            with _until(self._end, self._file):
                return name in found(self._source)
        except (Exception, Exceeded):  # noqa: BLE001 - the rendering says what is wrong
            return True

    def reads_variable(self, name: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a variable can make a difference: a template names it.

        A tokenizer of a kind of its own is tried with several values.
        """
        if self._by_template:
            return self._names(template_source.variables, name)
        own = dict(self.asked.chat_template_kwargs or {})
        value = own.pop(name)
        seen = {self.told(chat_template_kwargs=own).render(messages)}
        for tried in (value, True, False, _PROBE):
            try:
                seen.add(self.told(chat_template_kwargs={**own, name: tried}).render(messages))
            except PromptError:
                return tried is not value  # it looks at it, or takes no such argument
        return len(seen) > 1

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of `messages`, which are plain JSON. Raises PromptError where there is none."""
        try:
            with _until(self._end, self._file):
                if not self._by_template:
                    return self._asked(messages, begins=self._begins, continues=self.continues)
                if self.continues:
                    return _open_ended(self._rendered(_marked(messages)), messages)
                return self._rendered(messages)
        except Exceeded as error:
            raise PromptError(f"the chat template {error}; give plain text instead") from None
        except Exception as error:
            said = " ".join(str(error).split())[:500]
            raise PromptError(f"the chat template refuses these messages: {said}") from error

    def _asked(
        self, messages: Sequence[Mapping[str, Any]], *, begins: bool, continues: bool
    ) -> str:
        """What a tokenizer makes of a chat by itself."""
        fresh = copy.deepcopy(list(messages))  # which it may write into
        how: dict[str, Any] = {"continue_final_message": True} if continues else {}
        given = {"tools": self.asked.tools, "documents": self.asked.documents}
        how |= {name: value for name, value in given.items() if value is not None}
        how |= self.asked.chat_template_kwargs or {}
        found = self._tokenizer.apply_chat_template(
            fresh, tokenize=False, add_generation_prompt=begins, **copy.deepcopy(how)
        )
        if not isinstance(found, str):
            kind, whole = type(found).__name__, type(self._tokenizer).__name__
            raise TypeError(f"apply_chat_template of {whole} made a {kind} and no text")
        if len(found) > self._most(messages):
            raise Exceeded("makes far more text than the messages have")
        return found

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        template = template_source.compiled(self._source)
        environment: Any = template.environment
        environment.meter.left = self._most(messages)
        pieces = template.generate(
            messages=list(messages),
            tools=self.asked.tools,
            documents=self.asked.documents,
            add_generation_prompt=self._begins,
            **{**self._tokenizer.special_tokens_map, **(self.asked.chat_template_kwargs or {})},
        )
        found = []
        for piece in pieces:
            environment.meter.charge(len(piece))
            found.append(piece)
        return "".join(found)

    def _most(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """How many characters and items a rendering may make."""
        asked = self.asked
        given = [messages, asked.tools, asked.documents, asked.chat_template_kwargs]
        return MOST + TIMES * size_of(given, sys.maxsize)
