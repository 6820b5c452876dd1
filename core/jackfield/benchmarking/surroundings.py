"""Where, when and with what something was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jackfield.benchmarking.results import Row
from jackfield.devices import name_of

#: What figures depend on.
LIBRARIES = ("jackfield", "torch", "transformers", "numpy", "tokenizers", "triton")
#: Of programs that are none of these.
OF_PROGRAMS = {"llama.cpp": "llama-cpp-python"}


def surroundings(rows: Sequence[Row]) -> dict[str, Any]:
    """Versions, hardware, date and command, as JSON has them."""
    devices = {str((row.plan or {}).get("device", "cpu")) for row in rows}
    return {
        "versions": versions(rows),
        "hardware": ", ".join(sorted(map(name_of, devices))),
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
    }


def versions(rows: Sequence[Row]) -> dict[str, str]:
    """Of Python, of libraries, and of the distributions whose backends and programs ran."""
    found = {"python": platform.python_version()}
    names = {
        one["distribution"] for row in rows for one in (row.plan or {}).get("chosen", {}).values()
    }
    names |= {OF_PROGRAMS[row.program] for row in rows if row.program in OF_PROGRAMS}
    for name in sorted({*LIBRARIES, *names}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
