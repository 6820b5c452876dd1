"""A tokenizer's chat template, rendered within bounds of time and memory.

A template is a program of whoever wrote the model's files: jinja's sandbox keeps it from the host's
objects, but not from looping for ever or from making gigabytes. So every operation whose result can
be much larger than what goes into it is asked for its price before it is done, and every line that
the template runs looks at the clock. No process of its own is needed, and no lock.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, GeneratorType
from typing import TYPE_CHECKING, Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from jackfield.errors import PromptError

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.runtime import Context

SECONDS = 5.0  # of its thread's own time for one chat; an ordinary one takes a millisecond
MOST = 16_000_000  # characters and items that a template may make in all, and …
_TIMES = 32  # … as many times what the chat has

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # of transformers: templates strip the space, or do not
_PROBE = "Zr0rZ"
_TEMPLATE = "<template>"  # what jinja calls the file of a template that comes as a string
_LARGEST_INT = 4096  # bits
_METHODS = frozenset(
    {
        "center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust",
        "to_bytes", "translate", "zfill",
    }
)  # fmt: skip
_FILTERS = frozenset(
    {
        "batch", "center", "format", "indent", "join", "pprint", "replace", "round", "slice",
        "string", "sum", "tojson", "truncate", "urlize", "wordwrap", "xmlattr",
    }
)  # fmt: skip


class _Exceeded(BaseException):
    """Not an Exception, since jinja survives some of these."""


class _Meter(threading.local):
    """What the rendering of this thread may still make."""

    left = 0

    def charge(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise _Exceeded("makes far more text than the messages have")


def _parts(value: Any, most: int) -> Iterator[Any]:
    """A value and all that it is made of, all the way down; `most` of these at most."""
    stack = [value]
    while stack and most > 0:
        most -= 1
        yield (one := stack.pop())
        if isinstance(one, Mapping):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            stack += one


def _size(value: Any, most: int) -> int:
    """Characters and items in a value, all the way down; it is not counted on above `most`."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    found = 0
    for one in _parts(value, most + 1):
        found += 1 + (len(one) if isinstance(one, str | bytes) else 0)
    return found


def _numbers(value: Any, most: int) -> list[int]:
    """The sizes of all whole numbers in a value."""
    return [abs(one) for one in _parts(value, most) if isinstance(one, int)]


class _Generator(CodeGenerator):
    """Has what joins texts and what makes containers go through the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(environment.shown, (")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")))")

    def _made(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:  # the names of an assignment
            super().visit_Tuple(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' own environment for chat templates, with prices."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, own: Any) -> None:
        super().__init__(
            trim_blocks=own.trim_blocks,
            lstrip_blocks=own.lstrip_blocks,
            extensions=[type(extension) for extension in own.extensions.values()],
            optimized=False,
            finalize=self.shown,
        )
        self.meter = _Meter()
        self.globals.update({k: v for k, v in own.globals.items() if k not in ("range", "lipsum")})
        del self.globals["lipsum"]
        self.filters = {name: self._priced(name, act) for name, act in own.filters.items()}

    def made(self, value: Any) -> Any:
        """A container that a template wrote down."""
        self.meter.charge(_size(value, self.meter.left))
        return value

    def shown(self, value: Any) -> Any:
        """What becomes text."""
        if not isinstance(value, str):
            self.meter.charge(_size(value, self.meter.left))
        return value

    def concat(self, parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.meter.charge(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and type(left) is int and type(right) is int:
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits + right.bit_length() > _LARGEST_INT:
                raise _Exceeded("computes with numbers of thousands of digits")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(times, int):
                    self.meter.charge(len(sized) * max(0, times))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.meter.charge(len(left) + len(right))
        elif operator == "%" and isinstance(left, str | bytes):
            self._charge_product("format", (str(left), right), {})
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """As in jinja, whose names leave those of the arguments free."""
        method = getattr(__obj, "__wrapped__", __obj)
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if name in _METHODS and owner is not None:
            __self._charge_product(name, (owner, *args), kwargs)
        found = super().call(__context, __obj, *args, **kwargs)
        if isinstance(found, list | tuple | dict):  # also `split` and `dict`
            __self.meter.charge(len(found))
        return found

    def _priced(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is charged for."""

        @functools.wraps(act)
        def priced(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(a) if isinstance(a, GeneratorType) else a for a in args)
            if name in _FILTERS:
                self._charge_product(name, args, kwargs)
            found = act(*args, **kwargs)
            if hasattr(found, "__len__"):
                self.meter.charge(len(found))
            return found

        return priced

    def _charge_product(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Charge what can come of these: each may be repeated as often as another is large."""
        values = [*args, *kwargs.values()]
        if name == "replace":  # what is looked for makes nothing larger
            del values[1:2]
        widths = [1]
        if name in ("format", "format_map"):
            form = next((v for v in values if isinstance(v, str)), "")
            widths += [int(digits[:9]) for digits in re.findall(r"\d+", form)]
            if re.search(r"\*|\{[^{}]*\{", form):  # a number among the values is a width
                widths += _numbers(values, self.meter.left)
            values = [v for v in values if not isinstance(v, int | float)]
        product = max(widths)
        for value in values:
            numeric = isinstance(value, int) and not isinstance(value, bool)
            product *= max(1, abs(value) if numeric else _size(value, self.meter.left))
            if product > self.meter.left:
                break
        self.meter.charge(product)


@contextlib.contextmanager
def _until(end: float, file: str) -> Iterator[None]:
    """Every line of `file` or a template, and every function that is called, looks at the clock.

    The functions themselves end: what they are handed was measured.
    """

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if time.thread_time() > end:
            raise _Exceeded(f"does not end within {SECONDS:g} s of computing")
        return look if frame.f_code.co_filename in (file, _TEMPLATE) else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.lru_cache(32)
def _compiled(source: str) -> Template:
    # of another template: transformers' environment would compute this one's constants
    own = chat_template_utils._compile_jinja_template("").environment
    environment = _Environment(own)
    environment.meter.left = MOST
    return environment.from_string(source)


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

    It `begins` a turn of the assistant's after the last message, or `continues` that: the text
    ends where the message does, as `continue_final_message` of transformers has it.
    `reads(key)`: whether the template speaks of a key at all. A tokenizer of a kind of its own,
    which renders by itself, is called instead, within the same time; what it makes is weighed when
    it is done.
    """

    def __init__(self, tokenizer: Any, *, begins: bool = True, continues: bool = False) -> None:
        self.continues = continues
        self._begins = begins
        self._tokenizer = tokenizer
        self._end = time.thread_time() + SECONDS
        own = getattr(type(tokenizer), "apply_chat_template", None)
        self._by_template = own is PreTrainedTokenizerBase.apply_chat_template
        self._source = str(tokenizer.get_chat_template()) if self._by_template else ""
        self._file = getattr(getattr(own, "__code__", None), "co_filename", _TEMPLATE)

    def reads(self, key: str) -> bool:
        if self._by_template:
            return key in self._source
        said = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", key: _PROBE},
        ]
        try:
            with _until(self._end, self._file):
                return _PROBE in self._asked(said, begins=False, continues=False)
        except (Exception, _Exceeded):  # noqa: BLE001 - as it will do with the chat
            return False

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of `messages`, which are plain JSON. Raises PromptError where there is none."""
        try:
            with _until(self._end, self._file):
                if not self._by_template:
                    return self._asked(messages, begins=self._begins, continues=self.continues)
                if self.continues:
                    return _open_ended(self._rendered(_marked(messages)), messages)
                return self._rendered(messages)
        except _Exceeded as error:
            raise PromptError(f"the chat template {error}; give plain text instead") from None
        except Exception as error:
            said = " ".join(str(error).split())[:500]
            raise PromptError(f"the chat template refuses these messages: {said}") from error

    def _asked(
        self, messages: Sequence[Mapping[str, Any]], *, begins: bool, continues: bool
    ) -> str:
        """What a tokenizer makes of a chat by itself."""
        fresh = copy.deepcopy(list(messages))  # which it may write into
        how = {"continue_final_message": True} if continues else {}
        found = self._tokenizer.apply_chat_template(
            fresh, tokenize=False, add_generation_prompt=begins, **how
        )
        if not isinstance(found, str):
            kind, whole = type(found).__name__, type(self._tokenizer).__name__
            raise TypeError(f"apply_chat_template of {whole} made a {kind} and no text")
        if len(found) > MOST + _TIMES * _size(messages, sys.maxsize):
            raise _Exceeded("makes far more text than the messages have")
        return found

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        template = _compiled(self._source)
        environment: Any = template.environment
        most = MOST + _TIMES * _size(messages, sys.maxsize)
        environment.meter.left = most
        # from 5.22 on, transformers gives reasoning the names under which templates read it
        alias = getattr(chat_template_utils, "_alias_reasoning_fields", list)
        pieces = template.generate(
            messages=alias(messages),
            tools=None,
            documents=None,
            add_generation_prompt=self._begins,
            **self._tokenizer.special_tokens_map,
        )
        found = []
        for piece in pieces:
            environment.meter.charge(len(piece))
            found.append(piece)
        return "".join(found)
