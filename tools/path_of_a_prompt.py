"""What one `generate()` of the demo model meets: the files, and the classes whose methods run.

    python tools/path_of_a_prompt.py [--list]

The engine is warm: what is found once and then kept is not counted. A class is met where one of its
methods runs, its constructor included.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from types import FrameType
from typing import Any

import jackfield

met: dict[str, set[str]] = defaultdict(set)  # the functions that ran, by module
made: set[type] = set()  # the dataclasses whose constructors ran


def note(frame: FrameType, event: str, arg: Any) -> None:
    """Note the function that is entered, where it is jackfield's."""
    module = frame.f_globals.get("__name__", "")
    if event == "call" and module.partition(".")[0] in ("jackfield", "jackfield_plugins"):
        met[module].add(frame.f_code.co_qualname)
        if "__create_fn__" in frame.f_code.co_qualname:
            made.add(type(frame.f_locals["self"]))


def classes(module: str) -> set[str]:
    """The classes of a module whose methods ran."""
    names = {name.split(".")[0] for name in met[module]}
    found = {name for name in names if isinstance(getattr(sys.modules[module], name, None), type)}
    return found | {kind.__name__ for kind in made if kind.__module__ == module}


if __name__ == "__main__":
    with jackfield.load("demo") as engine:
        for _ in range(2):  # the first one warms it
            met.clear()
            made.clear()
            threading.setprofile(note)  # the worker's thread begins with the request
            sys.setprofile(note)
            engine.generate("Once upon a time", max_new_tokens=8)
            sys.setprofile(None)
            threading.setprofile(None)
    if "--list" in sys.argv:
        for module in sorted(met):
            print(f"{module}: {', '.join(sorted(met[module]))}")
    count = sum(len(classes(module)) for module in met)
    print(f"{count} classes in {len(met)} files, {sum(map(len, met.values()))} functions")
