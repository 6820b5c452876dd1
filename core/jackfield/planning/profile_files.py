"""A profile: selections that were measured, as TOML, with what was measured, where and when.

Read only where a caller names one. Nothing of a profile names a file or a model: it selects
installed backends, of their options those that are numbers, truth values and words of a closed
set, and sizes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackfield.errors import UsageError, quoted, shown
from jackfield.planning.profile_options import free_option
from jackfield.planning.solving import ARGUMENTS
from jackfield.spelling import nearest

FORMAT = 1
LARGEST = 1_000_000  # bytes of a profile
ANEW = "`jackfield tune` writes one"

#: What of a batch a profile may say.
SIZES = ("max_batch_size", "max_batch_tokens", "prefill_chunk_size")
#: Every argument of `jackfield.load` that one may have.
SELECTABLE = (*ARGUMENTS.values(), "dtype", "device_map", *SIZES)
MOST = 1 << 31  # of a size

#: What is read of [made], and what it is.
_MADE = {
    "architecture": str, "config": str, "hardware": str, "finished": bool,
    "versions": dict, "named": dict,
}  # fmt: skip
_KINDS = {str: "a text", bool: "true or false", dict: "a table"}


@dataclass(frozen=True)
class Profile:
    """What a profile says.

    Attributes:
        file: Its name, for messages.
        selections: Arguments of `jackfield.load`, some of `SELECTABLE`.
        made: How it came to be, as `surroundings` has it, and more; empty: nobody says.
        evidence: What was measured, a row each.
    """

    file: str
    selections: Mapping[str, Any]
    made: Mapping[str, Any] = field(default_factory=dict)
    evidence: Sequence[Mapping[str, Any]] = ()


def read_profile(file: str | Path) -> Profile:
    """Read a profile. Raises UsageError where there is none, or where it has an error."""
    path = Path(file)
    try:
        if not path.is_file():
            raise UsageError(f"there is no profile {shown(path)}; {ANEW}")
        text = path.read_bytes()[: LARGEST + 1]
    except OSError as error:
        raise UsageError(f"the profile {shown(path)} cannot be read: {error.strerror}") from None
    if len(text) > LARGEST:
        raise UsageError(f"{shown(path)} is no profile: it has more than {LARGEST} bytes; {ANEW}")
    try:
        found = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the profile {shown(path)} is not TOML: {shown(error)}") from None
    _check(found, f"the profile {shown(path)}")
    made, evidence = found.get("made", {}), found.get("evidence", [])
    return Profile(str(path), found["selections"], made, evidence)


def _check(found: Mapping[str, Any], what: str) -> None:
    if type(found.get("format")) is not int or found["format"] != FORMAT:
        said = f"is of format {quoted(found['format'])}" if "format" in found else "has no format"
        raise UsageError(f"{what} {said}, and this jackfield reads format = {FORMAT}; {ANEW}")
    for name in found:
        if name not in (known := ("format", "selections", "made", "evidence")):
            raise UsageError(
                f"{what} has no table {shown(name)!r} (it has {', '.join(known)})"
                f"{nearest(name, known)}"
            )
    selections, made = found.get("selections"), found.get("made", {})
    evidence = found.get("evidence", [])
    if not isinstance(selections, dict):
        raise UsageError(f'{what} needs a table [selections], such as attn_implementation = "sdpa"')
    _check_made(made, what)
    if not isinstance(evidence, list) or not all(isinstance(one, dict) for one in evidence):
        raise UsageError(f"{what}: evidence must be tables, each below [[evidence]]")
    for name, value in selections.items():
        _check_selection(name, value, what)


def _check_made(made: Any, what: str) -> None:
    if not isinstance(made, dict):
        raise UsageError(f"{what}: made must be a table")
    for name, kind in _MADE.items():
        if name in made and not isinstance(made[name], kind):
            raise UsageError(
                f"{what}: made.{name} must be {_KINDS[kind]}, not {quoted(made[name])}"
            )
    for table, kinds in (("versions", str), ("named", str | int | float)):
        for name, value in made.get(table, {}).items():
            if not isinstance(value, kinds):
                raise UsageError(
                    f"{what}: made.{table}.{shown(name)} must be a text, not {quoted(value)}"
                )


def _check_selection(name: str, value: Any, what: str) -> None:
    if name not in SELECTABLE:
        raise UsageError(
            f"{what} selects no {shown(name)!r} (it may have {', '.join(SELECTABLE)})"
            f"{nearest(name, SELECTABLE)}"
        )
    if name in SIZES:
        if type(value) is not int or not 1 <= value <= MOST:
            bound = f"at most {MOST}" if type(value) is int and value > MOST else "at least 1"
            raise UsageError(f"{what}: {name} must be a whole number, {bound}, not {quoted(value)}")
        return
    if not _is_selection(name, value):
        raise UsageError(f'{what}: {name} must be a text such as "auto", not {quoted(value)}')
    if (free := free_text(name, value)) is not None:
        raise UsageError(
            f"{what}: {name}={quoted(value)} has the option {free!r}, which is any text and may "
            f"name a file or a model; drop it, and name {name} yourself"
        )


def _is_selection(name: str, value: Any) -> bool:
    """A text; of backends also several, of decodings and devices also a table of these."""
    if isinstance(value, dict):
        given = name in ("decoding", "device_map") and bool(value)
        return given and all(_is_text(name, one) for one in value.values())
    return _is_text(name, value) or (name == "compile" and isinstance(value, bool))


def _is_text(name: str, value: Any) -> bool:
    if isinstance(value, list):
        given = name in ARGUMENTS.values() and bool(value)
        return given and all(isinstance(one, str) for one in value)
    return isinstance(value, str) or (name == "device_map" and type(value) is int)


def free_text(name: str, value: Any) -> str | None:
    """The option of a selection that no profile may set; None: it has none."""
    kind = next((kind for kind, argument in ARGUMENTS.items() if argument == name), None)
    return None if kind is None else free_option(kind, value)
