"""Through what an object stays alive: the names that lead to it from a module."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

DEPTH = 24  # references between a module and what it keeps


def kept(what: str, seen: Callable[[], object]) -> str:
    """The message of a check: `what` stays, and through what. `seen` is a weak reference to it."""
    way = through(seen())
    return f"{what}: through {way or 'nothing that Python can see'}"


def through(thing: object) -> str:
    """The shortest way to `thing` from a module.

    Looks at every object of the process, once for each step of the way.

    Returns:
        As in "package.KEPT[0].model"; "" where Python's collector sees none: C++ may hold it, or
        a function that runs.
    """
    loaded = sys.modules.copy()  # in which somebody may put what is no module
    modules = {id(m.__dict__): name for name, m in loaded.items() if hasattr(m, "__dict__")}
    levels: list[list[Any]] = [[thing]]
    before: dict[int, tuple[int, int]] = {}  # id -> level and place of what it refers to
    # What is made here refers to it too, and so do those who ask.
    ours = {id(levels), id(levels[0]), *_frames()}
    for level in range(DEPTH):
        places = {id(one): place for place, one in enumerate(levels[level])}
        holders = gc.get_referrers(*levels[level])
        found: list[Any] = []
        ours |= {id(holders), id(found)}
        for holder in holders:
            at = [places[id(one)] for one in gc.get_referents(holder) if id(one) in places]
            if not at or id(holder) in ours or id(holder) in before or holder is thing:
                continue
            before[id(holder)] = level, at[0]
            found.append(holder)
            if id(holder) in modules:
                return _told(_way(holder, before, levels), modules)
        levels.append(found)
        del holders
        if not found:
            break
    return ""


def _frames() -> Iterator[int]:
    """Those of this thread."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        yield id(frame)
        frame = frame.f_back


def _way(root: Any, before: dict[int, tuple[int, int]], levels: list[list[Any]]) -> list[Any]:
    """From `root` to what it keeps."""
    way = [root]
    while (at := before.get(id(way[-1]))) is not None:
        way.append(levels[at[0]][at[1]])
    return way


def _told(way: list[Any], modules: dict[int, str]) -> str:
    text = modules[id(way[0])]
    owner: Any = sys.modules[text]
    for holder, held in pairwise(way):
        text += _step(holder, held, attributes=getattr(owner, "__dict__", None) is holder)
        owner = holder
    return text


def _step(holder: Any, held: Any, *, attributes: bool) -> str:
    """How `held` is reached from `holder`; "" where the next step says it.

    `attributes`: `holder` is the dictionary of an object's.
    """
    if isinstance(holder, dict):
        names = (_brief(name, attributes) for name, own in [*holder.items()] if own is held)
        return next(names, ".keys()")
    if isinstance(holder, list | tuple):
        return f"[{next(at for at, one in enumerate(holder) if one is held)}]"
    if getattr(holder, "__dict__", None) is held or isinstance(holder, types.CellType):
        return ""
    for name in (*_PARTS, *getattr(holder, "__dict__", ())):
        if getattr(holder, name, None) is held:
            return f".{name}"
    return f" ({type(holder).__name__})"


def _brief(key: object, attribute: bool) -> str:
    if attribute and isinstance(key, str):
        return f".{key}"
    text = repr(key) if isinstance(key, str | int | tuple) else type(key).__name__
    return f"[{text}]" if len(text) < 40 else f"[{text[:37]}...]"


#: What functions, methods and partial ones refer to, beside attributes of their own.
_PARTS = ("__closure__", "__defaults__", "__self__", "__func__", "__wrapped__", "func", "args")
