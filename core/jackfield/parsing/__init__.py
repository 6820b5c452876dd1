"""What a model says, as parts: content, thoughts, and calls of tools.

`format_of(tokenizer)` finds the form of a model; a `Format` says what to ask an engine for
(`settings`), how the chat template wants calls (`messages`), and has a `parser` for each answer,
whose `push` and `finish` turn the text into parts.
"""

from jackfield.parsing.calling import Calling
from jackfield.parsing.formats import KNOWN, Format, format_of
from jackfield.parsing.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
    merged,
)
from jackfield.parsing.tools import ToolChoice

__all__ = [
    "KNOWN", "CallArguments", "CallBegun", "CallEnded", "Calling", "Content", "Format", "Part",
    "Reasoning", "ToolChoice", "format_of", "merged",
]  # fmt: skip
