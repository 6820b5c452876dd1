"""What runs in the process in which a plugin is tried (`trial_process.py` starts it)."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

from jackfield.errors import PluginError
from jackfield.registry.contained import contained, flush_c
from jackfield.registry.loading import Source, within


def begin(name: str) -> None:
    """Load what the request in a folder asks for, and leave the process to end as it will."""
    folder = Path(name)
    request = json.loads((folder / "request.json").read_text())
    entry_point = EntryPoint(request["name"], request["value"], request["group"])
    hung = os.open(folder / "hung", os.O_WRONLY | os.O_CREAT)  # stays open to the end
    (folder / "begun").touch()
    faulthandler.dump_traceback_later(request["seconds"], exit=True, file=hung)
    with contained() as seen, contextlib.suppress(PluginError):
        within(threading.TIMEOUT_MAX, Source(entry_point, "", ""))
    flush_c()
    written = os.lseek(1, 0, os.SEEK_END)
    (folder / "answer").write_text(json.dumps([written, seen.changes]))
    faulthandler.dump_traceback_later(request["seconds"], exit=True, file=hung)
