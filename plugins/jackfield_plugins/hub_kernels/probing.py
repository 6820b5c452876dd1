"""Run untried code in a process of its own: one that exits or crashes there ends nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jackfield.errors import shown
from jackfield_plugins.hub_kernels import KernelRefused

SECONDS = 300  # a first call may compile a kernel


def probe(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run `python -m module request.json answer.json`; returns the answer it wrote.

    Raises KernelRefused where the process ends without one, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="jackfield-probe-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, str(asked), str(answered)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise KernelRefused(f"it did not answer within {SECONDS} s when it was tried") from None
        if answered.is_file():
            answer: dict[str, Any] = json.loads(answered.read_text())
            return answer
    raise KernelRefused(
        f"it {_ending(done.returncode)} when it was tried{_last_words(done.stderr)}"
    )


def _ending(code: int) -> str:
    if code < 0:
        return f"crashed its process (signal {-code})"
    return f"ended its process with exit code {code}"


def _last_words(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return f" ({shown(lines[-1])})" if lines else ""
