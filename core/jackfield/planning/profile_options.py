"""Options that no profile sets: those that are any text, and so may name a file or a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jackfield.errors import OptionError, SelectionError
from jackfield.planning.keywords import without_paged
from jackfield.registry.discovery import registry
from jackfield.spelling import Selection, parse


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
