"""The tables of `docs/departures.md`: `python tests/conformance/departures.py` writes them anew.

What they say stands in `jackfield.requests.vocabulary`; which decoding honours what is asked of the
decodings that are installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from jackfield.registry.discovery import registry
from jackfield.requests.chat_settings import OF_A_CHAT
from jackfield.requests.vocabulary import (
    ALIASES,
    ARGUMENTS,
    CODE,
    DRAFTING,
    EARLY_EXIT,
    FACTS,
    FILLED_IN,
    LOOP,
    REFUSED,
    USE_MTP,
)

PAGE = Path(__file__).parents[2] / "docs" / "departures.md"
_PLACE = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def honoured() -> dict[str, set[str]]:
    """Every setting that is honoured, and the decodings of this package that do."""
    own = [r for r in registry().of_kind("decoding") if r.distribution == "jackfield"]
    found = {name: {r.name for r in own} for name in LOOP}
    for registered in own:
        for name in registered.backend.capabilities.settings:  # type: ignore[attr-defined]
            found.setdefault(name, set()).add(registered.name)
        if registered.backend.capabilities.assistant:  # type: ignore[attr-defined]
            found.setdefault(EARLY_EXIT, set()).add(registered.name)
        if registered.backend.capabilities.heads:  # type: ignore[attr-defined]
            found.setdefault(USE_MTP, set()).add(registered.name)
    return found


def tables() -> dict[str, str]:
    by, every = honoured(), set().union(*honoured().values())
    names = {
        name: "every decoding" if who == every else ", ".join(f"`{one}`" for one in sorted(who))
        for name, who in by.items()
    }
    also = dict.fromkeys(OF_A_CHAT, "every decoding, for a chat")
    also |= {alias: f"another name of `{name}`" for alias, name in ALIASES.items()}
    rest = {name: why for name, why in DRAFTING.items() if name not in REFUSED and name not in by}
    assert not rest, rest
    return {
        "honoured": _grouped({**names, **also}),
        "facts": ", ".join(f"`{name}`" for name in sorted(FACTS)),
        "filled": ", ".join(f"`{name}={value}`" for name, value in FILLED_IN.items()),
        "drafting": ", ".join(f"`{name}`" for name in sorted(DRAFTING)),
        "code": _grouped(CODE),
        "refused": _grouped(REFUSED),
        "arguments": _grouped(ARGUMENTS),
    }


def _grouped(rows: Mapping[str, str]) -> str:
    """A table with a row for each text, and all the names that have it."""
    of: dict[str, list[str]] = {}
    for name in sorted(rows):
        of.setdefault(rows[name], []).append(name)
    lines = [f"| {_ticked(names)} | {text} |" for text, names in of.items()]
    return "\n".join(["| name | |", "|---|---|", *lines])


def _ticked(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written() -> str:
    """The page with its tables made anew."""
    found = tables()
    return _PLACE.sub(
        lambda m: f"<!-- {m[1]} -->\n\n{found[m[1]]}\n\n<!-- end -->",
        PAGE.read_text(encoding="utf-8"),
    )


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
