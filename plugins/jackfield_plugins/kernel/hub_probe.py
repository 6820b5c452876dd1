"""``python -m jackfield_plugins.kernel.hub_probe request.json answer.json``: import a layer.

In a process of its own, since a kernel for another processor may end the one that imports it.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from jackfield_plugins.hub_kernels.repository import brief, load_build


def look(request: dict[str, Any]) -> dict[str, Any]:
    """An empty answer, or what stands against it under `refused`."""
    try:
        layers = getattr(load_build(Path(request["folder"])), "layers", None)
    except Exception as error:  # noqa: BLE001 - whatever a stranger's module raises
        return {"refused": f"does not import ({type(error).__name__}: {brief(error)})"}
    classes = [n for n, c in vars(layers).items() if inspect.isclass(c)] if layers else []
    if request["layer"] not in classes:
        return {
            "refused": f"it has no layer {request['layer']!r} (its layers: "
            f"{', '.join(sorted(classes)) or 'none'})"
        }
    return {}


if __name__ == "__main__":
    answer = look(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
