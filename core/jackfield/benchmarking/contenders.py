"""Who is measured: selections of backends, and other programs on the same weights."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.errors import UsageError, first_line, shown
from jackfield.planning.profiles import taken
from jackfield.planning.solving import ARGUMENTS
from jackfield.requests.arguments import OF_LOADING
from jackfield.spelling import AUTO, PREFIX, nearest

OURS = "jackfield"

#: Programs that can be measured beside jackfield, and what each is.
RIVALS = {
    "generate": "transformers' generate, in padded batches",
    "generate_batch": "transformers' continuous batching",
    "llama.cpp": "llama.cpp, on a GGUF file",
}


@dataclass(frozen=True)
class Contender:
    """A row of the table. `arguments` are those of `jackfield.load`, `model` among them.

    `program` is `OURS` or one of `RIVALS`.
    """

    label: str
    arguments: Mapping[str, Any]
    program: str = OURS

    @property
    def ours(self) -> bool:
        return self.program == OURS


def asked_for(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The selections among arguments of `jackfield.load` that leave no choice, by kind."""
    found = {kind: arguments.get(name) for kind, name in ARGUMENTS.items()}
    return {kind: name for kind, name in found.items() if isinstance(name, str) and name != AUTO}


def contender(label: str, given: Mapping[str, Any]) -> Contender:
    """A selection of backends; keys of `given` are kinds ("attention") or arguments of `load`.

    With a `profile` among them, what they leave open is what it says. Raises UsageError for a key
    that is neither, and for a file that is no profile.
    """
    arguments = {}
    for key, value in given.items():
        name = ARGUMENTS.get(key, key)
        if name not in OF_LOADING | {"model"}:
            known = sorted({*ARGUMENTS, "model", "dtype"})
            raise UsageError(
                f"{label}: a selection has no {shown(key)!r} (it has {', '.join(known)}, and any "
                f"other argument of jackfield.load){nearest(key, known)}"
            )
        arguments[name] = value
    if (profile := arguments.get("profile")) is not None:
        arguments = {**taken(arguments, OF_LOADING), "profile": str(profile)}
    return Contender(label, arguments)


def product(
    alternatives: Mapping[str, Sequence[str | int]], common: Mapping[str, Any]
) -> list[Contender]:
    """Every combination of the alternatives of each kind; a label says what is its own."""
    kinds = [kind for kind, names in alternatives.items() if names]
    varied = [kind for kind in kinds if len(alternatives[kind]) > 1] or kinds
    found = []
    for chosen in itertools.product(*(alternatives[kind] for kind in kinds)):
        one = dict(zip(kinds, chosen, strict=True))
        label = " + ".join(_told(kind, one[kind]) for kind in varied) or AUTO
        found.append(contender(label, {**common, **one}))
    check_labels(found)
    return found


def _told(kind: str, chosen: Any) -> str:
    if kind == "tp_size":
        return f"tp {chosen}"
    return kind if chosen is True else str(chosen).removeprefix(PREFIX)


def of_file(path: Path, common: Mapping[str, Any]) -> list[Contender]:
    """Selections of a JSON file: a list of objects, each with kinds, and `label` where it likes.

    Raises UsageError for what is not that.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {shown(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown(path)} is not JSON: {first_line(error)}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(
            f'{shown(path)} must be a list of selections, such as [{{"attention": "sdpa"}}]'
        )
    found = []
    for row in rows:
        own = dict(row)
        told = " + ".join(_told(kind, value) for kind, value in own.items())
        label = str(own.pop("label", told or AUTO))
        found.append(contender(label, {**common, **own}))
    check_labels(found)
    return found


def rival(name: str, common: Mapping[str, Any]) -> Contender:
    """Another program on the same weights. Raises UsageError for one that is not there."""
    if name not in RIVALS:
        raise UsageError(
            f"there is no rival {name!r} (there are {', '.join(RIVALS)}){nearest(name, RIVALS)}"
        )
    # Told before ours was measured, which takes minutes.
    if name == "llama.cpp" and importlib.util.find_spec("llama_cpp") is None:
        raise UsageError("llama.cpp is not here; pip install llama-cpp-python, or drop this rival")
    return Contender(name, dict(common), program=name)


def check_labels(found: Sequence[Contender]) -> None:
    """Raise UsageError where two rows have one label."""
    seen: set[str] = set()
    for one in found:
        if one.label in seen:
            raise UsageError(f"two rows are called {one.label!r}; give each a label of its own")
        seen.add(one.label)
