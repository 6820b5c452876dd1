"""Standard output and error while a plugin loads: what its thread prints is captured."""

from __future__ import annotations

import io
import reprlib
import sys
import threading
from typing import Any

STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")
_here = threading.local()


def is_loading() -> bool:
    """Whether this thread is a plugin's that loads."""
    return getattr(_here, "loads", False)


def loads() -> None:
    """From now on this thread is a plugin's that loads."""
    _here.loads = True


class _Bytes(io.BytesIO):
    def close(self) -> None:
        """Never: others print here, too."""


class KeptStream(io.TextIOWrapper):
    """Stands for a standard stream; what threads `there` before write goes to it as ever.

    None: only what the thread that loads writes is kept. The plugin may hold on to it: what it
    writes later goes to `later`, where nothing is spoilt.
    """

    def __init__(self, stream: Any, there: set[int | None] | None, later: Any) -> None:
        self._bytes = _Bytes()
        super().__init__(self._bytes, "utf-8", "backslashreplace", "", write_through=True)
        self._stream, self._there, self._later = stream, there, later
        self._ended = False

    def _target(self) -> Any:
        """None: it is kept."""
        if self._ended:  # somebody who redirects the streams may have put it back
            again = any(getattr(sys, name, None) is self for name in STREAMS)
            return self._stream if again else self._later
        if self._there is None:
            return None if is_loading() else self._stream
        return self._stream if threading.get_ident() in self._there else None

    def write(self, text: str) -> int:
        target = self._target()
        return super().write(text) if target is None else target.write(text)

    def flush(self) -> None:
        if (target := self._target()) is not None:
            target.flush()

    @property
    def buffer(self) -> Any:
        target = self._target()
        return self._bytes if target is None else target.buffer

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        target = self._target()
        return target is not None and target.isatty()

    def close(self) -> None:
        """Never: the stream is not the plugin's."""

    def end(self) -> str:
        """What was kept, for a message."""
        text = self._bytes.getvalue().decode(errors="backslashreplace")
        self._ended = True
        return reprlib.repr(" ".join(text.split())) if text else ""
