"""What to write instead of a flag or a command of transformers."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Collection, Sequence

from jackfield.requests.arguments import OF_LOADING
from jackfield.requests.habits import (
    COMMANDS,
    DECODING_OPTIONS,
    DECODINGS,
    FLAG_OF,
    FLAGS,
    KEYWORDS,
)
from jackfield.requests.other_engines import LOADING, REQUESTS

#: An argument with its value, as the answers for Python have it.
_ASSIGNED = re.compile(r"\b([a-z_]+)=('[^']*'|\[.*\]|\{[^}]*\}|[0-9.]+|True|False)")


def with_values(arguments: Sequence[str]) -> list[str]:
    """The arguments, a bare --compile being transformers' switch for torch.compile."""
    found = list(arguments)
    for at, argument in enumerate(found):
        if argument == "--":
            break
        if argument == "--compile" and (at + 1 == len(found) or found[at + 1].startswith("-")):
            found[at] = "--compile=inductor"
    return found


def instead_of_flag(flag: str, known: Collection[str]) -> str | None:
    """What to write instead of `flag` where a command takes the flags `known`; None: no idea."""
    name = flag.lstrip("-").replace("-", "_")
    if (ours := f"--{name.replace('_', '-')}") in known:
        return f"write {ours}"
    if (positive := name.removeprefix("no_")) in KEYWORDS or positive in FLAGS:
        name = positive
    if name in FLAGS:
        return FLAGS[name]
    if name in DECODINGS or name in DECODING_OPTIONS:
        backend = {**DECODINGS, **DECODING_OPTIONS}[name]
        return f"write --decoding '{backend}?{name}=…'"
    habit = KEYWORDS.get(name)
    if habit is not None:
        value = next(iter(habit.values.values()), "…")
        return f"write {_flag(habit.ours)} {value}" if habit.ours else _with_flags(habit.answer)
    if name in LOADING:
        return _in_flags(LOADING[name], known)
    if name in REQUESTS and "--set" in known:
        return _in_flags(REQUESTS[name], known)
    return _setting(name, known)


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


def _flag(argument: str) -> str:
    return FLAG_OF.get(argument, f"--{argument.replace('_', '-')}")


def _with_flags(answer: str) -> str:
    """An answer for Python, with its arguments of `jackfield.load` as flags."""
    return re.sub(r"write (\w+)=", lambda match: f"write {_flag(match[1])} ", answer)


def _setting(name: str, known: Collection[str]) -> str | None:
    from jackfield.requests.vocabulary import OWN

    if name not in OWN | REQUESTS.keys():
        from transformers import GenerationConfig

        if name not in vars(GenerationConfig()):
            return None
    if "--set" in known:
        return f"write --set {name}=…"
    if "--new-key" in known:
        return "it is a field of each request"
    return "it is a setting of `jackfield generate` and `chat`"


def instead_of_command(name: str) -> str | None:
    return COMMANDS.get(name)
