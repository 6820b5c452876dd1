"""From what a caller writes (``plugin:dist/name?key=value``) to a name and typed options."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from jackfield.errors import OptionError, SelectionError, error_text, first_line
from jackfield.guarded import guarded

AUTO = "auto"
PREFIX = "plugin:"

#: What a caller may pass for a kind: "auto", one name, or a list of names (declared fallbacks).
Selectable = str | Sequence[str]

#: What a caller may pass for the quantizer: also one of transformers' quantization config objects.
Quantizable = Selectable | Any

_NAME = re.compile(r"(?:(?P<distribution>[A-Za-z0-9._-]+)/)?(?P<name>[A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class Selection:
    """One named backend. `arguments` are the raw texts of its options."""

    name: str
    distribution: str | None = None
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        where = f"{self.distribution}/" if self.distribution else ""
        query = "&".join(f"{_quoted(k)}={_quoted(v)}" for k, v in self.arguments.items())
        return f"{PREFIX}{where}{self.name}{'?' + query if query else ''}"


def _quoted(text: str) -> str:
    return quote(text, safe="/:@,+")


def parse(text: str) -> Selection:
    """Parse one selection; the ``plugin:`` in front is optional."""
    if not isinstance(text, str):
        raise SelectionError(f"a backend is selected by a string like 'plugin:sdpa', not {text!r}")
    head, mark, query = text.removeprefix(PREFIX).partition("?")
    match = _NAME.fullmatch(head)
    if match is None:
        raise SelectionError(
            f"cannot read the selection {text!r}: write 'plugin:name', 'plugin:distribution/name' "
            "or 'plugin:name?option=value'"
        )
    return Selection(match["name"], match["distribution"], _arguments(text, query) if mark else {})


def parse_all(value: Selectable) -> list[Selection | str]:
    """Parse what a caller passed for one kind: selections in order of preference, or "auto"."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence):  # a set has no order, and None is nobody's name
        raise SelectionError(
            f"a backend is selected by 'auto', a string like 'plugin:sdpa' or a list of these, "
            f"not {value!r}"
        )
    if not texts:
        raise SelectionError("an empty list of fallbacks selects nothing; name a backend or 'auto'")
    return [AUTO if text == AUTO else parse(text) for text in texts]


def _arguments(text: str, query: str) -> dict[str, str]:
    """The options, percent-decoded. Not `parse_qsl`: its "+" is a space, ours is part of 1e+5."""
    arguments: dict[str, str] = {}
    for pair in query.split("&"):
        key, equals, value = map(unquote, pair.partition("="))
        if not (key and equals):
            raise OptionError(
                f"cannot read the options in {text!r}: write '?option=value&other=value'"
            )
        if key in arguments:
            raise OptionError(f"option {key!r} is given twice in {text!r}; give it once")
        arguments[key] = value
    return arguments


def nearest(name: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """ "; did you mean 'x'?" where some known name is close, otherwise an empty string.

    `likeness` is how alike two names must be, up to 1: more where `known` has many.
    """
    spelt = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), spelt, n=3, cutoff=likeness)
    # One that is much farther away than the closest (hooks share a long prefix) is noise.
    ratios = [difflib.SequenceMatcher(None, c, name.lower()).ratio() for c in close]
    names = [repr(spelt[c]) for c, r in zip(close, ratios, strict=True) if r > ratios[0] - 0.1]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def make_options(options: type, arguments: Mapping[str, str], owner: object) -> Any:
    """An instance of the frozen dataclass `options`, from texts. `owner`, as a string, names whose.

    Raises OptionError for an unknown key, a text that is not of the field's type, a missing
    required field, and a ValueError of the class itself; PluginError for any other error of it.
    """
    fields = {field.name: field for field in dataclasses.fields(options) if field.init}
    hints = typing.get_type_hints(options)
    values = {}
    for key, given in arguments.items():
        if key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise OptionError(
                f"{owner} has no option {key!r} (options: {known}){nearest(key, fields)}"
            )
        values[key] = _convert(given, hints[key], f"option {key!r} of {owner}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise OptionError(f"{owner} needs the option {missing[0]!r}: write '?{missing[0]}=…'")
    with guarded(owner, "options"):
        try:
            return options(**values)
        except ValueError as error:
            raise OptionError(first_line(error)) from None


def option_flaws(options: type) -> list[str]:
    """Why texts cannot be turned into fields of the dataclass `options`."""
    try:
        hints = typing.get_type_hints(options)
    except BaseException as error:  # noqa: BLE001 - a plugin's own annotations
        return [f"the types of `options` cannot be read: {error_text(error)}"]
    return [
        f"option {field.name!r} is of type {hints[field.name]}; options are int, float, bool, str, "
        "Literal or one of these | None"
        for field in dataclasses.fields(options)
        if field.init and not _readable(hints[field.name])
    ]


def _readable(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        return len(rest) == 1 and _readable(rest[0])
    return hint in (int, float, bool, str) or typing.get_origin(hint) is typing.Literal


_PLAIN = re.compile(r"[-+.0-9a-zA-Z]+")
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _convert(text: str, hint: Any, what: str) -> Any:
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        for choice in choices:
            if text == str(choice) or (
                isinstance(choice, bool) and text.lower() == str(choice).lower()
            ):
                return choice
        raise OptionError(f"{what} must be one of {', '.join(map(str, choices))}, not {text!r}")
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        (inner,) = (choice for choice in choices if choice is not type(None))
        return _convert(text, inner, what)
    try:
        if hint in (int, float) and not _PLAIN.fullmatch(text):  # Python takes 1_0 and other digits
            raise ValueError
        return _BOOLS[text.lower()] if hint is bool else hint(text)
    except (KeyError, ValueError):
        raise OptionError(f"{what} must be of type {hint.__name__}, not {text!r}") from None
