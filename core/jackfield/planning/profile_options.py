"""Values of a profile: what no profile sets (options that are any text, and so may name a file or a
model), and which values mean the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jackfield.devices import numbered
from jackfield.errors import JackfieldError, OptionError, SelectionError
from jackfield.planning.device_map import asked
from jackfield.planning.keywords import without_paged
from jackfield.planning.solving import ARGUMENTS
from jackfield.registry.discovery import registry
from jackfield.requests.habits import VALUES
from jackfield.spelling import AUTO, Selection, parse


def free_option(kind: str, values: Any) -> str | None:
    """An option of the selections `values` that is neither number, truth value nor one of several
    words; None: there is none. What is no selection at all is for the plan to refuse.
    """
    for text in _texts(values):
        if "?" in text:
            with contextlib.suppress(SelectionError, OptionError):
                if (free := _free(kind, parse(without_paged(text)))) is not None:
                    return free
    return None


def _free(kind: str, selection: Selection) -> str | None:
    hints = get_type_hints(registry().find(kind, selection).backend.options)
    return next((n for n in selection.arguments if str in (hints.get(n), *_inner(hints, n))), None)


def _inner(hints: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """The types that an option may have, where it may have several."""
    hint = hints.get(name)
    return () if get_origin(hint) is Literal else get_args(hint)


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from _texts(list(values.values()))
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _texts(one)


def same(name: str, one: Any, other: Any) -> bool:
    """Whether two values of an argument of `jackfield.load` mean the same, however written."""
    try:
        if type(one) is type(other) and one == other:
            return True
        return bool(_meaning(name, one) == _meaning(name, other))
    except (JackfieldError, TypeError, ValueError, RuntimeError):  # the plan says what is wrong
        return False


def _meaning(name: str, value: Any) -> Any:
    if name == "dtype":
        return str(value).removeprefix("torch.")
    if name == "device_map":
        where = asked(value).device_map
        return numbered(where) if isinstance(where, str) and where != AUTO else where
    kind = next((kind for kind, argument in ARGUMENTS.items() if argument == name), None)
    if kind is None:
        return type(value), value
    if isinstance(value, Mapping):
        return [(key, _meaning(name, one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_selected(kind, one) for one in value]
    return [_selected(kind, value)]


def _selected(kind: str, value: Any) -> Any:
    """The backend that a value selects, and its options; what selects none is itself."""
    if isinstance(value, str | bool):
        value = VALUES.get(kind, {}).get(value, value)
    if not isinstance(value, str) or value == AUTO:
        return value
    selection = parse(value)
    found = registry().find(kind, selection)
    return found.name, found.distribution, found.options(selection.arguments)


def as_told(value: Any) -> Any:
    """A value as a profile can have it; None where it asks for nothing."""
    if value is None or value is False:
        return None
    if isinstance(value, Mapping):
        value = {str(key): one for key, one in value.items()}
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, default=str, sort_keys=True)
    return value if isinstance(value, str | int | float) else str(value)
