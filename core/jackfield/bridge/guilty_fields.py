"""Which field of a stranger's file a library fails over, found by leaving fields out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jackfield.bridge.quiet import quiet
from jackfield.errors import CheckpointError, quoted
from jackfield.foreign import read_json

_MOST = 200  # fields; each is left out once


def without_it(file: Path, act: Callable[[Path], object]) -> str:
    """The end of a message about `file`, a JSON object in a folder: " (…)", or an empty text.

    It names the first field without which `act(folder)` does not fail, where it fails with it.
    """
    try:
        fields = read_json(file)
    except CheckpointError:
        return ""
    if len(fields) > _MOST:
        return ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for other in file.parent.iterdir():
            if other.name != file.name:
                (folder / other.name).symlink_to(other.resolve())

        def fails(changed: Mapping[str, Any]) -> bool:
            (folder / file.name).write_text(json.dumps(changed))
            return _fails(act, folder)

        if not fails(fields):
            return ""
        for path, value, rest in _left_out(fields):
            if not fails(rest):
                return (
                    f" (without {'.'.join(path)}={quoted(value)} in {file.name} it would be read)"
                )
    return ""


def _left_out(fields: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, dict[str, Any]]]:
    """Each field, its value and all the others; fields inside of objects before the objects."""
    for name, value in fields.items():
        rest = {other: fields[other] for other in fields if other != name}
        if isinstance(value, dict):
            for path, inner, others in _left_out(value):
                yield (name, *path), inner, {**rest, name: others}
        yield (name,), value, rest


def _fails(act: Callable[[Path], object], folder: Path) -> bool:
    try:
        with quiet():
            act(folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 - also a panic of the tokenizers' library
        return True
    return False
