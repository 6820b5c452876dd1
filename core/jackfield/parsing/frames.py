"""The known forms of tool calls, as data that is matched against a chat template.

White space in the marks of a form is as models write it; there, any white space is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Body = Literal["object", "named", "python", "xml"]


@dataclass(frozen=True)
class Frame:
    """What stands around calls, from the outside to the inside.

    Attributes:
        name: What it is called in messages.
        body: How one call is written: an object of JSON with its name and arguments; its name, and
            then its arguments as JSON; as in Python; as tags.
        opens: Opens the calls of a turn; with `bare`, a turn may also begin with the calls.
        first, between, last: Around and between the calls, as in a list.
        closes: Closes the calls.
        call_opens, call_closes: Around each call.
        key: Of an object, what its arguments are called.
        name_opens, name_ends, arguments_end: Around the name and the arguments of a `named` body.
        id_opens: What comes before an id, between the name and the arguments.
    """

    name: str
    body: Body
    opens: str = ""
    bare: bool = False
    first: str = ""
    between: str = ""
    last: str = ""
    closes: str = ""
    call_opens: str = ""
    call_closes: str = ""
    key: str = "arguments"
    name_opens: str = ""
    name_ends: str = ""
    arguments_end: str = ""
    id_opens: str = ""

    @property
    def mark(self) -> str:
        """What calls are found by, wherever it stands; empty: only by being first."""
        return (self.opens or self.call_opens).strip()

    @property
    def marks(self) -> tuple[str, ...]:
        """All that may be tokens of their own."""
        found = (self.opens, self.first, self.between, self.last, self.closes, self.call_opens,
                 self.call_closes, self.name_opens, self.name_ends, self.arguments_end,
                 self.id_opens)  # fmt: skip
        return tuple(mark for mark in found if mark)


_DEEPSEEK = Frame(
    "DeepSeek V3.1",
    "named",
    opens="<｜tool▁calls▁begin｜>",
    closes="<｜tool▁calls▁end｜>",
    call_opens="<｜tool▁call▁begin｜>",
    call_closes="<｜tool▁call▁end｜>",
    name_ends="<｜tool▁sep｜>",
)

FRAMES = (
    Frame("Qwen3-Coder", "xml", call_opens="<tool_call>\n", call_closes="\n</tool_call>",
          between="\n"),
    Frame("Hermes", "object", call_opens="<tool_call>\n", call_closes="\n</tool_call>",
          between="\n"),
    Frame("Mistral", "object", opens="[TOOL_CALLS] ", first="[", between=", ", last="]"),
    Frame("Mistral with names", "named", call_opens="[TOOL_CALLS]", name_ends="[ARGS]"),
    Frame("Mistral with names and ids", "named", call_opens="[TOOL_CALLS]", name_ends="[ARGS]",
          id_opens="[CALL_ID]"),
    _DEEPSEEK,
    replace(_DEEPSEEK, name="DeepSeek V3", between="\n", name_opens="function<｜tool▁sep｜>",
            name_ends="\n```json\n", arguments_end="\n```"),
    Frame("pythonic in marks", "python", opens="<|tool_call_start|>", first="[", between=", ",
          last="]", closes="<|tool_call_end|>"),
    Frame("pythonic", "python", opens="<|python_start|>", bare=True, first="[", between=", ",
          last="]", closes="<|python_end|>"),
    Frame("Llama 3", "object", opens="<|python_tag|>", bare=True, between="; ", key="parameters"),
)  # fmt: skip

#: Marks that stand around nothing where calls come.
EMPTY = (("<|python_start|>", "<|python_end|>"),)
#: What stands around a thought.
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
