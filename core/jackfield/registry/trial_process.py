"""A plugin that was never loaded here is tried first, in a process of its own.

Some things that a module can do when it is imported cannot be contained in the process that
imports it: end it, crash it, hang with the interpreter's lock, or leave something behind that does
so when the process ends. In the other process that ends nothing else, and the plugin is refused
here. An exception is harmless: the load reports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path

from jackfield.registry.trial_results import TrialResult

#: The other process needs this long to start and to end, however busy the machine is.
_SLACK = 60.0

_running: set[subprocess.Popen[bytes]] = set()

_START = """
import json, sys
sys.path[:] = json.load(open(sys.argv[1] + "/request.json"))["path"]
from jackfield.registry.trial_child import begin
begin(sys.argv[1])
"""


def tried(entry_point: EntryPoint, seconds: float) -> TrialResult | None:
    """What loading it does to a process. None where no other process can be had here."""
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    request = {
        "name": entry_point.name,
        "value": entry_point.value,
        "group": entry_point.group,
        "path": sys.path,
        "seconds": min(seconds, 1e6),
    }
    with tempfile.TemporaryDirectory(prefix="jackfield-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        try:
            code = _run(folder, seconds)
        except OSError:
            return None
        if not (folder / "begun").exists():
            return None  # it never came to the plugin
        output = (folder / "output").read_bytes()
        answer = folder / "answer"
        written, changes = json.loads(answer.read_text()) if answer.exists() else (None, {})
        hung = code is None or (folder / "hung").stat().st_size > 0
    reason = _reason(code, written, output, seconds if hung else None)
    return TrialResult(reason, bool(written), float(seconds), changes)


def _run(folder: Path, seconds: float) -> int | None:
    """The exit code; None where it had to be ended."""
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(folder)],
            # what it starts itself may look for plugins, too
            env={**os.environ, "JACKFIELD_PLUGINS": "jackfield"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    _running.add(process)
    try:
        code = process.wait(min(2 * seconds + _SLACK, 1e6))
        if process not in _running:
            raise InterruptedError("it was ended, and says nothing of the plugin")
        return code
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(OSError, AttributeError):  # what it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        _running.discard(process)


def end_all() -> None:
    """Wait for no trial any more; nothing is known of what was tried."""
    running = list(_running)
    _running.clear()
    for process in running:
        process.kill()


def _reason(code: int | None, written: int | None, output: bytes, hung: float | None) -> str | None:
    when = "" if written is None else " after it was loaded"
    if hung is not None:
        return f"it did not end within {hung:g} s{when}"
    if code or written is None:
        assert code is not None
        try:
            how = signal.Signals(-code).name
        except ValueError:
            return f"it ended its process with exit code {code}{when}"
        return f"it ended its process with {how}{when}"
    if len(output) > written:
        text = " ".join(output[written:].decode(errors="replace").split())
        return f"it writes to standard output after it was loaded: {text[:80]!r}"
    return None
