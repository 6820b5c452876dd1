"""What to write instead of a flag or a command of transformers."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Collection, Sequence
from typing import Any

from jackfield.cli.flag_words import NEGATED, OF_BENCH, OF_WARM, SHORT, SO, WORDS, for_a_command
from jackfield.requests.arguments import OF_LOADING
from jackfield.requests.habits import (
    COMMANDS,
    DECODING_OPTIONS,
    DECODINGS,
    FLAG_OF,
    FLAGS,
    KEYWORDS,
)
from jackfield.requests.instead import is_neutral, of_loading, of_request
from jackfield.requests.other_engines import LOADING, REQUESTS

#: An argument with its value, as the answers for Python have it.
_ASSIGNED = re.compile(r"\b([a-z_]+)=('[^']*'|\[.*\]|\{[^}]*\}|[0-9.]+|True|False)")


def with_values(arguments: Sequence[str]) -> list[str]:
    """The arguments, a bare --compile being transformers' switch for torch.compile.

    A flag of llama.cpp of several letters is one, and not the first with the others behind it.
    """
    found = list(arguments)
    for at, argument in enumerate(found):
        if argument == "--":
            break
        behind_a_flag = at > 0 and found[at - 1].startswith("-")  # it may be that one's value
        if len(argument) > 2 and argument in SHORT and not behind_a_flag:
            found[at] = f"--{SHORT[argument].replace('_', '-')}"
        if argument == "--compile" and (at + 1 == len(found) or found[at + 1].startswith("-")):
            found[at] = "--compile=inductor"
    return found


def instead_of_flag(flag: str, known: Collection[str], value: Any = None) -> str | None:
    """What to write instead of `flag` where a command takes the flags `known`; None: no idea.

    `value` is what stands behind it; a flag that begins with "no" says False.
    """
    name = SHORT.get(flag, flag.lstrip("-").replace("-", "_"))
    if (ours := f"--{name.replace('_', '-')}") in known:
        return f"write {ours}"
    for table in (OF_BENCH, OF_WARM):
        if (ours := table.get(name, "")) in known:
            return f"write {ours} N"
    if name.startswith("no_") and name not in REQUESTS:
        return _instead_of_no(name.removeprefix("no_"), known)
    if value is not None and is_neutral(name, value):
        return SO
    if name in WORDS:
        return _worded(name, known)
    if name in FLAGS:
        return FLAGS[name]
    if name in DECODINGS or name in DECODING_OPTIONS:
        backend = {**DECODINGS, **DECODING_OPTIONS}[name]
        return f"write --decoding '{backend}?{name}=…'"
    habit = KEYWORDS.get(name)
    if habit is not None:
        if habit.asks_for_nothing(value):
            return SO
        ours = next(iter(habit.values.values()), "…")
        return f"write {_flag(habit.ours)} {ours}" if habit.ours else _with_flags(habit.answer)
    if name in LOADING:
        return _in_flags(of_loading(name, value), known)
    if name in REQUESTS and "--set" in known:
        return _in_flags(of_request(name, value), known)
    return _setting(name, known)


def _worded(name: str, known: Collection[str]) -> str | None:
    answer = WORDS[name]
    if "--set" in known:
        return answer.replace("{set}", f"write --set {_SET.get(name, name)}=")
    return _elsewhere(name, known) if "--set" in answer or "{set}" in answer else answer


def _instead_of_no(name: str, known: Collection[str]) -> str | None:
    """What to write instead of the flag that has `name` not be: what is not so asks for nothing."""
    if name in NEGATED:
        return NEGATED[name]
    if name in FLAGS:
        return FLAGS[name]
    if name in WORDS:
        if "{set}" in WORDS[name] and "--set" in known:
            return f"write --set {name}=false"
        habit = KEYWORDS.get(name)
        so = is_neutral(name, False) or (habit is not None and habit.asks_for_nothing(False))
        return SO if so else _worded(name, known)
    habit = KEYWORDS.get(name)
    if habit is not None:
        if False in habit.values:
            return f"write {_flag(habit.ours)} {habit.values[False]}"
        return SO if habit.asks_for_nothing(False) else _with_flags(habit.answer)
    for word in (name, f"use_{name}", f"enable_{name}"):
        if is_neutral(word, False):
            return SO
        if word in LOADING:
            return _in_flags(of_loading(word, False), known)
        if word in REQUESTS and "--set" in known:
            return _in_flags(of_request(word, False), known)
    return SO if name in DECODINGS else _setting(f"no_{name}", known)


def _in_flags(answer: str, known: Collection[str]) -> str:
    """An answer for Python, with its arguments as flags of a command that takes `known`."""
    return _ASSIGNED.sub(lambda found: _as_flag(found[1], found[2], known), answer)


def _as_flag(argument: str, value: str, known: Collection[str]) -> str:
    flag, python = _flag(argument), ast.literal_eval(value)
    if flag in known:
        if isinstance(python, bool):
            return flag if python else f"--no-{flag[2:]}"
        if isinstance(python, list):
            return " ".join(f"{flag} {shlex.quote(str(one))}" for one in python)
        if isinstance(python, dict):
            return f"{flag} {','.join(f'{place}={size}' for place, size in python.items())}"
        return f"{flag} {value}"
    if argument in OF_LOADING:
        return f"{argument}={value} in Python"
    return f"--set {shlex.quote(f'{argument}={json.dumps(python)}')}"


def _flag(argument: str | None) -> str:
    assert argument is not None
    return FLAG_OF.get(argument, f"--{argument.replace('_', '-')}")


def _with_flags(answer: str) -> str:
    """An answer for Python, with its arguments of `jackfield.load` as flags."""
    answer = for_a_command(answer)
    return re.sub(r"write (\w+)=", lambda match: f"write {_flag(match[1])} ", answer)


def _setting(name: str, known: Collection[str]) -> str | None:
    from jackfield.requests.vocabulary import OWN

    if name not in OWN | REQUESTS.keys():
        from transformers import GenerationConfig

        if name not in vars(GenerationConfig()):
            return None
    return f"write --set {name}=…" if "--set" in known else _elsewhere(name, known)


#: Settings that llama.cpp's flags have other names for.
_SET = {"typical": "typical_p"}


def _elsewhere(name: str, known: Collection[str]) -> str:
    """Where the setting `name` is given, which no flag of a command has."""
    if "--new-key" in known:
        from jackfield.serving.schema.theirs import of_a_body

        answer = of_a_body(_SET.get(name, name)) or ""
        if answer.startswith("there is no"):  # none, or nothing like it
            return answer.replace("nothing like it here; drop it", "none")
        return f"in a request: {answer}" if answer else "it is a field of each request"
    return "it is a setting of `jackfield generate` and `chat`"


def instead_of_command(name: str) -> str | None:
    return COMMANDS.get(name)
