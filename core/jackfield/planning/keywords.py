"""Keywords and names of backends as transformers and other engines write them, in ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from jackfield.errors import SelectionError, UsageError
from jackfield.requests.habits import (
    DECODING_OPTIONS,
    DECODINGS,
    KEYWORDS,
    NAMES,
    VALUES,
    Habit,
)
from jackfield.requests.instead import is_neutral, of_loading, of_request
from jackfield.requests.other_engines import ALIKE, LOADING, REQUESTS, our_name
from jackfield.spelling import AUTO, PREFIX, Selection, nearest

if TYPE_CHECKING:
    from jackfield.registry.backends import Registry

_PAGED = "paged|"
#: A kernel as transformers names one: a repository of the hub, a revision, a function in it.
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(:(?P<function>\w+))?")


#: What chooses a decoding and is no option of it.
_CHOOSING = ("assistant_model", "use_mtp")


def in_our_words(given: Mapping[str, Any], known: Collection[str], call: str) -> dict[str, Any]:
    """The arguments of `call`, which takes `known`, from what a transformers user writes.

    None is the same as nothing. Raises UsageError for what cannot be taken, with what to write.
    """
    found: dict[str, Any] = {}
    typed: dict[str, str] = {}  # what was written for each of `found`
    for name, value in given.items():
        if value is None:
            if not is_neutral(name, None):
                _check_known(name, known, call, value)
        elif name in known:
            _put(found, typed, name, value, f"{name}={_shown(name, value)}")
        elif (habit := KEYWORDS.get(name)) is not None:
            if not habit.asks_for_nothing(value):
                ours, taken = _taken(name, value, habit, known, call)
                _put(found, typed, ours, taken, f"{name}={_shown(name, value)}")
        elif name not in DECODINGS and name not in DECODING_OPTIONS:
            if is_neutral(name, value):
                continue
            _check_known(name, known, call, value)
            _refuse_setting(name, value, call)
    return _with_decoding(found, given)


def _taken(
    name: str, value: Any, habit: Habit, known: Collection[str], call: str
) -> tuple[str, Any]:
    ours = habit.ours if habit.ours in known else None
    if ours is None and habit.ours is not None:
        raise UsageError(f"{call} takes no {name}: it is {habit.ours} of jackfield.load")
    if ours is not None:
        for theirs, our_value in habit.values.items():
            if value is theirs or (type(value) is type(theirs) and value == theirs):
                return ours, our_value
        if not habit.answer:
            return ours, value
    raise UsageError(f"{call} takes no {name}={_shown(name, value)}: {habit.answer}")


def _refuse_setting(name: str, value: Any, call: str) -> None:
    """Raise UsageError with the way to have it in a request, or with what a request says to it.

    Where requests have no such setting, a neutral value asks for nothing here either.
    """
    from jackfield.requests.vocabulary import asks_for_nothing, unhonoured

    shown = _shown(name, value)
    if (instead := unhonoured(name)) is None:
        raise UsageError(
            f"{name}={shown} is a setting of a request, not of loading: "
            f"engine.generate(…, {name}={shown})"
        )
    if not asks_for_nothing(name, value):
        raise UsageError(f"{call} takes no {name}={shown}, nor does a request: {instead}")


def _shown(name: str, value: Any) -> str:
    """A value for a message: short, and never a secret."""
    plain = isinstance(value, str | int | float) or type(value).__module__ == "torch"
    plain = plain and "token" not in name.split("_")
    return repr(value) if plain and len(repr(value)) < 60 else "…"


def _put(found: dict[str, Any], typed: dict[str, str], ours: str, value: Any, said: str) -> None:
    """Note that `ours` is `value`, which the caller wrote as `said`. Raises UsageError."""
    before, wrote = found.setdefault(ours, value), typed.setdefault(ours, said)
    if before is not value and (type(before) is not type(value) or before != value):
        raise UsageError(f"{wrote} and {said} say two things of one argument, {ours}; give one")


def _check_known(name: str, known: Collection[str], call: str, value: Any) -> None:
    """Raise UsageError for a name that is neither ours nor transformers'."""
    if name in known or name in KEYWORDS or name in DECODINGS or name in DECODING_OPTIONS:
        return
    from jackfield.requests.vocabulary import ARGUMENTS, OWN

    if name in LOADING:
        raise UsageError(f"{call} takes no {name}: {of_loading(name, value)}")
    if name in REQUESTS:
        raise UsageError(f"{call} takes no {name}, which is of a call: {of_request(name, value)}")
    settings = OWN | _settings()
    if name not in settings | ARGUMENTS.keys():
        of_load = [*known, *KEYWORDS, *DECODINGS]
        close = nearest(name, [*of_load, *settings], ALIKE)
        own = nearest(name, of_load, ALIKE)
        near = close if close == own else nearest(name, settings, ALIKE)
        if near and near != own:
            near += " That is for engine.generate"
        raise UsageError(f"{call} takes no argument {name!r}{near}")


def _settings() -> frozenset[str]:
    """What `generate` calls a setting, in the installed version."""
    from transformers import GenerationConfig

    return frozenset({"stop", *vars(GenerationConfig())})


def _with_decoding(found: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`found`, where a setting names the decoding that honours it."""
    said = {n: given[n] for n in (*DECODINGS, *DECODING_OPTIONS) if given.get(n) is not None}
    if said.get("num_beams") == 1 and said["num_beams"] is not True:
        del said["num_beams"]
    if not isinstance(heads := said.get("use_mtp", False), bool):
        raise UsageError(f"use_mtp must be True or False, not {_shown('use_mtp', heads)}")
    if not heads:
        said.pop("use_mtp", None)
    named = [name for name in DECODINGS if name in said]
    if len({DECODINGS[name] for name in named}) > 1:
        both = " and ".join(f"{name}=…" for name in named)
        raise UsageError(f"{both} name two decodings; write decoding={{'NAME': 'plugin:…', …}}")
    backend = DECODINGS[named[0]] if named else None
    options = {name: value for name, value in said.items() if name not in _CHOOSING}
    if stray := [n for n in options if {**DECODINGS, **DECODING_OPTIONS}[n] != backend]:
        owner = {**DECODINGS, **DECODING_OPTIONS}[stray[0]]
        raise UsageError(
            f"{stray[0]}={options[stray[0]]!r} is an option of a decoding: "
            f"decoding='{owner}?{stray[0]}={options[stray[0]]}', or a setting of a request"
        )
    if backend is None:
        return found
    selected = Selection(backend, None, {n: str(v) for n, v in options.items()})
    if found.get("decoding", AUTO) == AUTO:
        found["decoding"] = str(selected)
    elif options or "use_mtp" in said:
        raise UsageError(
            f"{named[0]}={said[named[0]]!r} stands for decoding={str(selected)!r}, and "
            f"decoding={found['decoding']!r} is given too; give one"
        )
    return found


def without_paged(attention: str) -> str:
    """The attention that transformers means by "paged|NAME"."""
    return attention.removeprefix(PREFIX).removeprefix(_PAGED)


def selected(selections: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """What selects a backend of each kind, in our words. Raises SelectionError."""
    found = dict(selections)
    attention = found.get("attention")
    if isinstance(attention, str) and attention.removeprefix(PREFIX).startswith(_PAGED):
        cache = found.get("cache") or AUTO
        if cache != AUTO and not str(cache).removeprefix(PREFIX).startswith("paged"):
            raise SelectionError(
                f"attn_implementation={attention!r} means cache_implementation='paged', and "
                f"{cache!r} is given; give one of them"
            )
        inner = without_paged(attention)
        if not inner:
            raise SelectionError(f"{attention!r} names no attention; write 'paged|sdpa'")
        _check_hub(inner, registry, also=", cache_implementation='paged'")
        found["attention"] = inner
        found["cache"] = "paged" if cache == AUTO else cache
    return {kind: _value(kind, value, registry) for kind, value in found.items()}


def _value(kind: str, value: Any, registry: Registry) -> Any:
    if value is None:
        return AUTO
    if isinstance(value, list | tuple):
        for one in value:
            if isinstance(one, str) and one.removeprefix(PREFIX).startswith(_PAGED):
                raise SelectionError(
                    f"{one!r} names a cache, too; in a list write attn_implementation="
                    f"[{without_paged(one)!r}, …] and "
                    "cache_implementation='paged'"
                )
        return [_value(kind, one, registry) for one in value]
    if kind == "attention" and isinstance(value, Mapping):
        raise SelectionError(
            "attn_implementation takes one attention for the whole decoder, not a dict; name one"
        )
    if not isinstance(value, str | bool):
        _check_object(kind, value)
        return value
    if value in {found.name for found in registry.of_kind(kind)}:
        return value  # what an installed backend is called is nobody else's word for another
    if value in VALUES.get(kind, {}):
        return VALUES[kind][value]
    ours = NAMES.get(kind, {}).get(value) or our_name(kind, str(value))
    if ours is not None:
        raise SelectionError(f"there is no {kind} {value!r} here: write '{ours}'")
    if value is True and kind == "kernel":
        raise SelectionError(f"kernels=True: {KEYWORDS['use_kernels'].answer}")
    if kind == "attention" and isinstance(value, str):
        _check_hub(value, registry)
    return value


def _check_object(kind: str, value: Any) -> None:
    """Refuse transformers' own config objects where a name has options."""
    if kind == "compiler" and type(value).__name__ == "CompileConfig":
        raise SelectionError(f"compile takes no CompileConfig: {KEYWORDS['compile_config'].answer}")
    if kind == "quantizer" and isinstance(value, Mapping):
        raise SelectionError(
            "quantization takes no dict; give an object such as BitsAndBytesConfig(…), or a name"
        )


def _check_hub(text: str, registry: Registry, also: str = "") -> None:
    """Answer transformers' name of a kernel of the hub with ours, and what it says `also`."""
    match = _HUB.fullmatch(text)
    distributions = {r.distribution for r in registry.of_kind("attention")}
    if match is None or match["repo"].partition("/")[0] in distributions:
        return
    options = f"repo={match['repo']}&revision={match['revision'] or '…'}"
    options += f"&function={match['function']}" if match["function"] else ""
    which = "" if match["revision"] else ", with the commit, tag or branch that is to run"
    raise SelectionError(
        f"there is no plugin distribution {text.partition('/')[0]!r}; a kernel of the hub is "
        f"attn_implementation='hub?{options}'{also}{which}"
    )
