"""The file beside the output that says what a job is: so that it goes on as it began, or not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from jackfield.batch.results import write_whole
from jackfield.bridge.source import packaged
from jackfield.errors import ExecutionError, UsageError, shown
from jackfield.planning.locking import lock_of
from jackfield.planning.planning import Plan

_ENDS = 64 * 1024  # bytes of each end of a model's file that stand for it
_SUFFIXES = frozenset({".gguf", ".jinja", ".json", ".model", ".safetensors", ".txt"})
_HEAD, _TAIL = b'{\n  "batch": ', b"\n}\n"
_ANEW = "give another file for the output, where a job begins anew"


class JobFile:
    """What was asked for when a job began, and a lock of what ran (`planning/locking.py`).

    One process has it at a time. `began` is when the job did, in seconds since 1970. Raises
    UsageError where another has it, or it is not of a job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - `__exit__` closes it
        except OSError as error:
            raise UsageError(f"{shown(path)} cannot be written: {error.strerror}") from None
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            if not (_hold(self._file) and _is_there(self._file, path)):
                raise UsageError(f"another process works on this job ({path}); let it end first")
            self._content = self._read()
            stack.pop_all()

    def __enter__(self) -> JobFile:
        return self

    def __exit__(self, *_: object) -> None:
        """A job that has not begun leaves nothing behind."""
        if not self.has_begun:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()

    def _read(self) -> dict[str, Any] | None:
        self._file.seek(0)
        text = self._file.read()
        if _is_torn(text):  # before anything was answered
            return None
        try:
            found = json.loads(text)
            dict(found["batch"]["asked"]), dict(found["batch"]["ran"]), int(found["batch"]["began"])
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"{self.path} is not the file of a batch job; {_ANEW}") from None
        return dict(found)

    @property
    def has_begun(self) -> bool:
        return self._content is not None

    @property
    def began(self) -> int:
        assert self._content is not None
        return int(self._content["batch"]["began"])

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raise UsageError where it began with something else, by name."""
        if self._content is not None:
            self._compare(self._content["batch"]["asked"], asked)

    def begin(self, asked: Mapping[str, Any], plan: Plan, ran: Mapping[str, Any], now: int) -> None:
        """Write down what the job is. Raises UsageError where it went otherwise before, and
        ExecutionError where it cannot be written.
        """
        if self._content is not None:
            self._compare(self._content["batch"]["ran"], ran)
            return
        batch = {"asked": dict(asked), "ran": dict(ran), "began": now}
        content = {"batch": batch, "remedy": _ANEW, **lock_of(plan)}
        text = json.dumps(content, indent=2, default=str) + "\n"
        try:
            self._file.truncate(0)
            write_whole(self._file, text.encode(), 0)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ExecutionError(f"{self.path} cannot be written: {error.strerror}") from None
        self._content = json.loads(text)

    def _compare(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(now, default=str))
        apart = [
            f"{name} was {shown(was.get(name))} and is {shown(now.get(name))}"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name)
        ]
        if apart:
            raise UsageError(
                f"not the job that {self.path} began: {'; '.join(apart)}; run it as it began, or "
                f"{_ANEW}"
            )


def _is_torn(text: bytes) -> bool:
    """Whether it is the beginning of a job's file, of which the rest was never written."""
    return not text.endswith(_TAIL) and text[: len(_HEAD)] == _HEAD[: len(text)]


def _hold(file: FileIO) -> bool:
    """Whether this process alone has the file now; the system gives it back, whatever happens."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(2**30)  # far behind what is read: there a lock keeps everybody from reading
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_there(file: FileIO, path: Path) -> bool:
    """Whether it is still what stands at `path`: who had it may have taken it away."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def content_of_model(model: str) -> str | None:
    """What stands for the content of a model's files: names, sizes, and both ends of each.

    None for a model of the hub, which has a commit. Raises UsageError for what cannot be read.
    """
    place = Path(packaged(model))
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(f for f in place.iterdir() if f.suffix in _SUFFIXES and f.is_file())
    else:
        return None
    whole = hashlib.sha256()
    for file in files:
        try:
            whole.update(_ends_of(file))
        except OSError as error:
            raise UsageError(f"cannot read {shown(file)}: {error.strerror}") from None
    return f"sha256:{whole.hexdigest()}"


def _ends_of(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as content:
        begins = content.read(_ENDS)
        content.seek(max(0, size - _ENDS))
        ends = content.read(_ENDS)
    return f"{file.name}\0{size}\0".encode(errors="surrogateescape") + begins + ends
